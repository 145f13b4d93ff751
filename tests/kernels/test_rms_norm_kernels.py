"""The rms_norm kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.norms.rms_norm
from interpreter import find

TYPES = {"fp32": torch.float32, "fp16": torch.float16}

def run(path, n, aligned, of_rows="fp32", of_weight="fp32", residual=1, mode=1, rows=9):
    choices = {"X": of_rows, "W": of_weight, "RESIDUAL": residual}
    has_weight, offset = mode & 1, 0.5 * (mode & 1)
    two_levels = 2, (2 * n, n)
    inner, strides = (0, (0, n)) if aligned else two_levels
    forward, backward = (find(k).pick(choices, n, aligned) for k in ("rms_norm_fwd", "rms_norm_bwd"))
    torch.manual_seed(0)
    x, r, dy, ds = (torch.randn(rows, n).to(TYPES[of_rows]) for _ in range(4))
    w = torch.randn(n).to(TYPES[of_weight])
    y, s, rstd, dx = torch.full_like(x, float("nan")), torch.empty_like(x), torch.empty(rows), torch.full_like(x, float("nan"))
    c = forward.config.constexprs
    forward.kernel.function[(-(-rows // c["BLOCK_M"]),)](
        y, s, rstd, x, r, w, rows, n, inner, *strides * 3, 0.25, offset, mode | 8, **forward.constexprs)
    s = s if residual else x
    # In the interpreter, a loop over rows counts in Python integers, which the kernel takes in two levels only.
    inner, strides = two_levels
    c = backward.config.constexprs
    got, few = {}, min(rows, c["BLOCK_M"])
    for name, programs, count, final in (("", 2, rows, 0), ("_final", 1, few, 32)):
        dw, partial = torch.full_like(w, float("nan")), torch.full((2, n), float("nan"))
        backward.kernel.function[(programs,)](
            dx.fill_(float("nan")), dw, partial, dy, ds, s, w, rstd, count, n, inner, *strides * 4, offset,
            mode | 16 * has_weight | final, **backward.constexprs)
        untouched = [partial if final else dw] if has_weight else [partial, dw]
        assert all(t.isnan().all() for t in untouched)
        got["dx" + name] = dx[:count].clone()
        if has_weight:
            got["dw" + name] = dw if final else partial.sum(0)
    numpy.savez(path, x=x, r=r, w=w, dy=dy, ds=ds, y=y, s=s, **got)
"""
# One tile and several, aligned and unaligned. Streamed rows: one row per slot, half a row.
QUICK = [(40, True), (2560, True), (60, False), (700, False)]
QUICK += [(4000, True, "fp16", "fp32"), (12_296, True, "fp16", "fp16")]
# Without a residual, in each casting mode (1: has a weight, 2: rows are rounded before the weight). A third of a row.
QUICK += [(40, True, "fp16", "fp16", 0, mode) for mode in (0, 1, 3)]
QUICK += [(60, False, "fp16", "fp16", 0, 3), (12_288, True, "fp16", "fp16", 0, 3)]
THOROUGH = [(128, True), (5000, True), (12_288, True, "fp16", "fp16"), (40, True, "fp32", "fp32", 0, 3)]
THOROUGH += [(700, False, "fp32", "fp32", 0, 0), *((12_288, True, "fp16", "fp16", 0, mode) for mode in (0, 1))]


def formula(s, w, mode, dtype):
    """In fp64, except for the casting mode's rounding, which is the identity in backward. Epsilon is large, so that it
    matters."""
    normed = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 0.25)
    if mode & 2:
        normed = normed + (normed.to(dtype) - normed).detach()
    return normed if w is None else normed * (w + 0.5)


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    """Runs the kernels on CPU tensors and checks every gradient."""
    got, (residual, mode) = interpreted, case[4:] or (1, 1)
    few = len(got["dx_final"])  # rows that one program processes per step
    dtype = got["x"].dtype

    def results(x, r, w, dy, ds, mode=mode):
        # The kernel rounds the sum.
        s = x + r + ((x + r).to(dtype) - (x + r)).detach() if residual else x
        found, parameters = {"s": s, "y": formula(s, w if mode & 1 else None, mode, dtype)}, [w] * (mode & 1)
        for final, rows in (("", len(s)), ("_final", few)):
            y = formula(s[:rows], w if mode & 1 else None, mode, dtype)
            loss = (y * dy[:rows]).sum() + residual * (s * ds)[:rows].sum()
            dx, *dw = torch.autograd.grad(loss, [s, *parameters], retain_graph=True)
            found |= {f"dx{final}": dx[:rows], **({f"dw{final}": dw[0]} if dw else {})}
        return found

    inputs = [got[name] for name in ("x", "r", "w", "dy", "ds")]
    wanted = [
        "y",
        *(["s"] if residual else []),
        *(f"{name}{final}" for name in ("dx", *["dw"] * (mode & 1)) for final in ("", "_final")),
    ]
    # The casting mode rounds the normalised row, which may go either way.
    precision = dtype if mode & 2 or residual else torch.float32
    assert_as_the_formula([(name, got[name]) for name in wanted], results, inputs, precision)
    if got["x"].dtype == torch.float16 and mode & 1:
        # The tolerance would hide rounding in the wrong place, so results must be closer to their own mode.
        wide = [t.double().requires_grad_() for t in inputs]
        expected, other = results(*wide), results(*wide, mode=mode ^ 2)
        for name in ("y", "dw"):
            ours, theirs = (torch.linalg.vector_norm(got[name] - t[name].detach()) for t in (expected, other))
            assert ours < theirs, name
