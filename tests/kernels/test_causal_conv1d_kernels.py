"""The causal_conv1d kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.conv.causal_conv1d as kernels
from interpreter import find

TYPES = {"fp32": torch.float32, "fp16": torch.float16}
SILU, BIAS, STATE, SAMPLES, NEEDS = 1, 2, 4, 8, 16 + 32 + 64

def run(path, n, aligned, width=4, length=9, dilation=1, flags=SILU | BIAS, of_rows="fp32", of_weight="fp32"):
    torch.manual_seed(0)
    batch, past, nan = 2, (width - 1) * dilation, float("nan")
    rows, weights = dict(dtype=TYPES[of_rows]), dict(dtype=TYPES[of_weight])
    x, dy, state = (torch.randn(batch, t, n).to(**rows) for t in (length, length, past))
    weight, bias = torch.randn(n, width).to(**weights), torch.randn(n).to(**weights)
    samples = (torch.arange(length) * 3 // length + torch.arange(batch)[:, None]).int()
    # Rows of x are those of a wider tensor.
    wide = torch.cat([torch.full_like(x, nan), x], -1)
    masked = int(width != 4 or bool(flags & SAMPLES))
    choices = {"X": of_rows, "W": of_weight, "WIDTH": 4 if width <= 4 else 8, "MASKED": masked}
    forward, backward = (find(f"causal_conv1d_{k}").pick(choices, n, aligned) for k in ("fwd", "bwd"))

    def shares(variant):
        c = variant.config.constexprs
        chunks = -(-length // dilation // (c["BLOCK_M"] * c["STEPS"])) or 1
        return chunks, chunks * dilation * batch, -(-n // c["BLOCK_N"])

    y = torch.full_like(x, nan)
    chunks, programs, blocks = shares(forward)
    forward.kernel.function[(programs * blocks,)](
        y, wide[..., n:], weight, bias, samples, state,
        length, n, width, dilation, chunks, length * 2 * n, 2 * n, flags, **forward.constexprs)
    chunks, programs, blocks = shares(backward)
    dx, dstate = torch.full_like(x, nan), torch.full_like(state, nan)
    dw, db = torch.full((programs, n, width), nan), torch.full((programs, n), nan)
    backward.kernel.function[(programs * blocks,)](
        dx, dstate, dw, db, dy, wide[..., n:], weight, bias, samples, state,
        length, n, width, dilation, chunks, length * n, n, length * 2 * n, 2 * n,
        flags | NEEDS | (128 if flags & STATE else 0), **backward.constexprs)
    numpy.savez(path, x=x, dy=dy, state=state, weight=weight, bias=bias, samples=samples,
                y=y, dx=dx, dstate=dstate, dweight=dw.sum(0), dbias=db.sum(0))
"""
ALL = 15
# Every width, of both variants; unaligned; several blocks of columns, and a narrow one.
QUICK = [(40, True, width, 9, 1, flags) for width in range(2, 9) for flags in (3, ALL)]
QUICK += [(13, False), (13, False, 7, 9, 2, ALL), (264, False, 3, 5), (1032, True, 4, 5, 1, ALL), (520, True, 7, 5)]
# Fewer rows than the past, one row, and gaps longer than the rows.
QUICK += [(8, True, 4, 2, 1, ALL), (8, True, 4, 1, 1, ALL), (8, True, 4, 3, 5, ALL), (8, True, 3, 20, 3, ALL)]
# More rows than a program has.
QUICK += [(136, True, 4, 150, 1, ALL)]
THOROUGH = [(8, True, 4, 600, 1, ALL), (136, True, 6, 150, 1, ALL), (8, False, 4, 300, 2, 3)]
# Without silu, without a bias; dtypes.
QUICK += [(40, True, 4, 9, 1, 0), (40, True, 4, 9, 1, 2), (40, True, 4, 9, 1, 1)]
QUICK += [(40, True, 4, 9, 1, ALL, "fp16", weight) for weight in ("fp16", "fp32")]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    dilation, flags = (*case[4:6], *(1, 3)[len(case[4:6]) :])
    samples = got["samples"] if flags & 8 else None
    activation = "silu" if flags & 1 else "none"
    names = ["x", "weight", *["bias"] * bool(flags & 2), *["state"] * bool(flags & 4)]

    def results(x, weight, bias, state, dy):
        given = dict(x=x, weight=weight, bias=bias, state=state)
        y = F.causal_conv1d.reference(
            x, weight, bias if flags & 2 else None, activation, dilation=dilation, seq_idx=samples,
            initial_state=state if flags & 4 else None,
        )  # fmt: skip
        grads = torch.autograd.grad((y * dy).sum(), [given[name] for name in names])
        return {"y": y, **{f"d{name}": grad for name, grad in zip(names, grads)}}

    inputs = [got[name] for name in ("x", "weight", "bias", "state", "dy")]
    wanted = ["y", *(f"d{name}" for name in names)]
    if "bias" not in names:
        assert not got["dbias"].isnan().any()
    assert_as_the_formula([(name, got[name]) for name in wanted], results, inputs, got["x"].dtype)
