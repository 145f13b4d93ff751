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

def run(path, n, aligned, width=4, length=9, dilation=1, flags=SILU | BIAS, of_rows="fp32", of_weight="fp32",
        sizes=None, groups=1):
    # sizes: of the parts in a group of columns, and of those that are not convolved.
    torch.manual_seed(0)
    sizes = sizes or [n, 0, 0, 0]
    columns, widths = groups * sum(sizes), [groups * size for size in sizes[:3]]
    assert sum(widths) == n
    batch, past, nan = 2, (width - 1) * dilation, float("nan")
    rows, weights = dict(dtype=TYPES[of_rows]), dict(dtype=TYPES[of_weight])
    x = torch.randn(batch, length, columns).to(**rows)
    dy, state = (torch.randn(batch, t, n).to(**rows) for t in (length, past))
    weight, bias = torch.randn(n, width).to(**weights), torch.randn(n).to(**weights)
    samples = (torch.arange(length) * 3 // length + torch.arange(batch)[:, None]).int()
    # Rows of x are those of a wider tensor.
    wide = torch.cat([torch.full_like(x, nan), x], -1)
    masked = int(width != 4 or bool(flags & SAMPLES))
    choices = {"X": of_rows, "W": of_weight, "WIDTH": 4 if width <= 4 else 8, "MASKED": masked}
    forward, backward = (find(f"causal_conv1d_{k}").pick(choices, max(widths), aligned) for k in ("fwd", "bwd"))

    def shares(variant):
        c = variant.config.constexprs
        chunks = -(-length // dilation // (c["BLOCK_M"] * c["STEPS"])) or 1
        return chunks, chunks * dilation * batch, sum(-(-width // c["BLOCK_N"]) for width in widths)

    def places(t):
        return [part for of_stride in zip(*(part.stride()[:2] for part in t)) for part in of_stride]

    parts = [torch.full((batch, length, width), nan, **rows) for width in widths]
    # A part of another tensor, and a whole one.
    dys = [dy[..., :widths[0]], *(t.contiguous() for t in dy[..., widths[0]:].split(widths[1:], -1))]
    layout = groups, *sizes[:3], sum(sizes)
    chunks, programs, blocks = shares(forward)
    forward.kernel.function[(programs * blocks,)](
        *parts, wide[..., columns:], weight, bias, samples, state,
        length, *layout, width, dilation, chunks, length * 2 * columns, 2 * columns, flags, **forward.constexprs)
    chunks, programs, blocks = shares(backward)
    dx, dstate = torch.full_like(x, nan), torch.full_like(state, nan)
    dw, db = torch.full((programs, n, width), nan), torch.full((programs, n), nan)
    backward.kernel.function[(programs * blocks,)](
        dx, dstate, dw, db, *dys, wide[..., columns:], weight, bias, samples, state,
        length, *layout, width, dilation, chunks, *places(dys), length * 2 * columns, 2 * columns,
        flags | NEEDS | (128 if flags & STATE else 0), **backward.constexprs)
    numpy.savez(path, x=x, dy=dy, state=state, weight=weight, bias=bias, samples=samples,
                y=torch.cat(parts, -1), dx=dx, dstate=dstate, dweight=dw.sum(0), dbias=db.sum(0))
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

# Columns of three parts that alternate by groups, with others between them.
SPLIT = [
    (48, True, 4, 9, 1, ALL, "fp32", "fp32", (8, 8, 8, 16), 2),
    (27, False, 3, 9, 2, 3, "fp32", "fp32", (2, 3, 4, 5), 3),
]
SPLIT += [
    (416, True, 4, 5, 1, 3, "fp32", "fp32", (136, 8, 272, 8), 1),
    (48, True, 7, 9, 1, 3, "fp32", "fp32", (8, 0, 16, 0), 2),
]
QUICK += SPLIT


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    dilation, flags = (*case[4:6], *(1, 3)[len(case[4:6]) :])
    sizes, groups = case[8:] or ((case[0],), 1)
    rest = torch.ones(got["x"].shape, dtype=torch.bool).unflatten(2, (groups, -1))
    rest[..., : sum(sizes[:3])] = False
    samples = got["samples"] if flags & 8 else None
    activation = "silu" if flags & 1 else "none"
    names = ["x", "weight", *["bias"] * bool(flags & 2), *["state"] * bool(flags & 4)]

    def results(x, weight, bias, state, dy):
        given = dict(x=x, weight=weight, bias=bias, state=state)
        parts = x.unflatten(2, (groups, -1))[..., : sum(sizes[:3])].split(sizes[:3], -1)
        y = F.causal_conv1d.reference(
            torch.cat([part.flatten(2) for part in parts], 2), weight, bias if flags & 2 else None, activation, dilation=dilation, seq_idx=samples,
            initial_state=state if flags & 4 else None,
        )  # fmt: skip
        grads = torch.autograd.grad((y * dy).sum(), [given[name] for name in names])
        return {"y": y, **{f"d{name}": grad for name, grad in zip(names, grads)}}

    # What is not convolved has another gradient, which the host writes.
    rest = rest.flatten(2)
    assert got["dx"][rest].isnan().all()
    got["dx"][rest] = 0
    inputs = [got[name] for name in ("x", "weight", "bias", "state", "dy")]
    wanted = ["y", *(f"d{name}" for name in names)]
    if "bias" not in names:
        assert not got["dbias"].isnan().any()
    assert_as_the_formula([(name, got[name]) for name in wanted], results, inputs, got["x"].dtype)
