"""The short_conv kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.conv.short_conv as kernels
from interpreter import find

TYPES = {"fp32": torch.float32, "fp16": torch.float16}
BIAS, WIDE, SAMPLES, NEEDS = 2, 4, 8, 16 + 32 + 64

def run(path, n, width=3, length=9, flags=BIAS, of_rows="fp32", of_weight="fp32"):
    torch.manual_seed(0)
    batch, nan = 2, float("nan")
    rows, weights = dict(dtype=TYPES[of_rows]), dict(dtype=TYPES[of_weight])
    bcx, dy = torch.randn(batch, length, 3 * n).to(**rows), torch.randn(batch, length, n).to(**rows)
    weight, bias = torch.randn(n, width).to(**weights), torch.randn(n).to(**weights)
    samples = (torch.arange(length) * 3 // length + torch.arange(batch)[:, None]).int()
    # Rows of wider tensors.
    wide, wide_dy = (torch.cat([torch.full_like(t, nan), t], -1) for t in (bcx, dy))
    exact = width == 3 and not flags & SAMPLES
    taken = 3 if exact else 4 if width <= 4 else 8
    choices = {"X": of_rows, "WIDTH": taken, "MASKED": int(not exact)}
    forward, backward = (find(f"short_conv_{k}").pick(choices, n, n % 8 == 0) for k in ("fwd", "bwd"))
    wider = of_weight != of_rows
    unread = torch.full_like(weight, nan, **rows), torch.full_like(bias, nan, **rows)
    unread_wide = [t.float() for t in unread]
    parameters = (unread[0], weight, unread[1], bias) if wider else (weight, unread_wide[0], bias, unread_wide[1])
    flags |= WIDE * wider

    def shares(variant):
        c = variant.config.constexprs
        chunks = -(-length // c["STEPS"])
        return chunks, chunks * batch, -(-n // c["BLOCK_N"])

    y = torch.full((batch, length, n), nan, **rows)
    places = length * 6 * n, 6 * n
    chunks, programs, blocks = shares(forward)
    forward.kernel.function[(programs * blocks,)](
        y, wide[..., 3 * n:], *parameters, samples, length, n, width, chunks, *places, flags, **forward.constexprs)
    chunks, programs, blocks = shares(backward)
    dbcx = torch.full_like(bcx, nan)
    dw, db = torch.full((programs, n, width), nan), torch.full((programs, n), nan)
    backward.kernel.function[(programs * blocks,)](
        dbcx, dw, db, wide_dy[..., n:], wide[..., 3 * n:], *parameters, samples, length, n, width, chunks,
        length * 2 * n, 2 * n, *places, flags | NEEDS, **backward.constexprs)
    numpy.savez(path, bcx=bcx, dy=dy, weight=weight, bias=bias, samples=samples,
                y=y, dbcx=dbcx, dweight=dw.sum(0), dbias=db.sum(0))
"""
BIAS, SAMPLES = 2, 8
# Every width, with and without samples; odd columns, and several blocks of them.
QUICK = [(40, width, 9, flags) for width in range(2, 9) for flags in (BIAS, BIAS | SAMPLES)]
QUICK += [(13,), (13, 7, 9, BIAS | SAMPLES), (264, 3, 5), (136, 7, 5, 0)]
# Fewer rows than the width, and more than a program has.
QUICK += [(8, 3, 1), (8, 7, 2), (8, 3, 150, BIAS | SAMPLES), (8, 3, 65, 0)]
THOROUGH = [(8, 3, 300), (8, 7, 150, BIAS | SAMPLES), (8, 4, 200)]
QUICK += [(40, width, 9, BIAS | SAMPLES, "fp16", weight) for width in (3, 7) for weight in ("fp16", "fp32")]
QUICK += [(n, 3, length, BIAS, "fp16", "fp16") for n, length in ((40, 9), (520, 70), (13, 9))]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    flags = case[3] if len(case) > 3 else BIAS
    names = ["bcx", "weight", *["bias"] * bool(flags & BIAS)]

    def results(bcx, weight, bias, dy):
        given = dict(bcx=bcx, weight=weight, bias=bias)
        samples = got["samples"] if flags & SAMPLES else None
        y = F.short_conv.reference(bcx, weight, bias if flags & BIAS else None, seq_idx=samples)
        grads = torch.autograd.grad((y * dy).sum(), [given[name] for name in names])
        return {"y": y, **{f"d{name}": grad for name, grad in zip(names, grads)}}

    inputs = [got[name] for name in ("bcx", "weight", "bias", "dy")]
    wanted = ["y", *(f"d{name}" for name in names)]
    assert_as_the_formula([(name, got[name]) for name in wanted], results, inputs, got["bcx"].dtype)
