"""The layer_norm kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

from liger_ops import functional as F

reference = F.layer_norm.reference

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.norms.layer_norm
from interpreter import find

TYPES = {"fp32": torch.float32, "fp16": torch.float16}

def run(path, n, aligned, of_rows="fp32", of_weight="fp32", weighted=True, rows=9):
    dtypes = {"X": of_rows, "W": of_weight}
    forward, backward = (find(k).pick(dtypes, n, aligned) for k in ("layer_norm_fwd", "layer_norm_bwd"))
    torch.manual_seed(0)
    x, dy = (t.to(TYPES[of_rows]) for t in (torch.randn(rows, n) + 3, torch.randn(rows, n)))
    w, b = (torch.randn(n).to(TYPES[of_weight]) for _ in range(2))
    given = 1 if weighted else 0
    nan = float("nan")
    y, dx, statistics = torch.full_like(x, nan), torch.full_like(x, nan), torch.full((2, rows), nan)
    forward.kernel.function[(-(-rows // forward.config.constexprs["BLOCK_M"]),)](
        y, statistics, x, w, b, rows, n, rows, 0, n, 0, n, 1e-5, given | 2 | 4, **forward.constexprs)
    out = dict(x=x, w=w, b=b, dy=dy, y=y)
    few, final = min(rows, backward.constexprs["BLOCK_M"]), 32
    wanted = {"both": 8 | 16, "dw": 8, "db": 16, "neither": 0, "both_final": 8 | 16 | final, "db_final": 16 | final}
    if n > 1000:  # the interpreter takes long
        wanted = {name: wanted[name] for name in ("both", "db", "both_final")}
    for name, flags in wanted.items():
        programs, count = (1, few) if flags & final else (2, rows)
        partial, outs = torch.full((2, 2, n), nan), torch.full((2, n), nan, dtype=w.dtype)
        backward.kernel.function[(programs,)](
            dx.fill_(nan), *outs, partial, dy, x, w, statistics[:, :count].contiguous(), count, n, count, 0, n, 0, n, 0, n,
            given | flags, **backward.constexprs)
        assert (partial if flags & final else outs).isnan().all()
        out["dx_" + name] = dx[:count].clone()
        out["parameters_" + name] = outs if flags & final else partial.sum(1)
    numpy.savez(path, **out)
"""
# One tile, several, prefetched, a loop in backward, a loop in both; aligned and unaligned. Streamed rows: one row per
# slot, a third of a row, half a row.
# One tile, prefetched, a loop in backward, a loop in both; aligned and unaligned. Streamed rows: one row per slot, half
# a row.
QUICK = [
    *((n, True) for n in (40, 4200, 13_000, 33_000)),
    *((n, False) for n in (60, 4099)),
    (4000, True, "fp16", "fp16"),
    (12_296, True, "fp16", "fp32"),
    (40, True, "fp32", "fp32", False),
]
# Several tiles; a third of a row.
THOROUGH = [
    *((n, True) for n in (128, 2560, 17_000)),
    (200, False),
    (12_288, True, "fp16", "fp16"),
    (12_296, True, "fp16", "fp16", False),
]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    """Runs the kernels on CPU tensors, for combinations of parameter gradients."""
    got = interpreted
    weighted = len(case) < 3 or case[-1] is not False
    few = len(got["dx_both_final"])  # rows that one program processes per step

    def results(x, w, b, dy):
        w = w if weighted else torch.ones_like(w).requires_grad_()
        y = reference(x, w, b)
        dx, dw, db = torch.autograd.grad(y, [x, w, b], dy)
        found = dict(y=y, dx=dx, dw=dw, db=db)
        dw, db = torch.autograd.grad(reference(x[:few], w, b), [w, b], dy[:few])
        return found | dict(dx_final=dx[:few], dw_final=dw, db_final=db)

    ours = [("y", got["y"])]
    names = [key.removeprefix("dx_") for key in got if key.startswith("dx_")]
    assert len(names) == (3 if got["x"].shape[1] > 1000 else 6)
    for name in names:
        final = "_final" * name.endswith("_final")
        ours.append((f"dx{final}", got[f"dx_{name}"]))
        for parameter, t in zip(("dw", "db"), got[f"parameters_{name}"]):
            if name.removesuffix("_final") in (parameter, "both"):
                ours.append((parameter + final, t))
            else:
                assert t.isnan().all(), f"{parameter} written though only {name} was asked for"
    assert_as_the_formula(ours, results, [got[name] for name in ("x", "w", "b", "dy")])
