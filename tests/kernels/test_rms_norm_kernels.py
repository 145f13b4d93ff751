"""The rms_norm kernels, in Triton's interpreter on CPU tensors."""

import torch
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
    s = (got["x"] + residual * got["r"]).double().requires_grad_()
    w = got["w"].double().requires_grad_() if mode & 1 else None
    few = len(got["dx_final"])  # rows that one program processes per step

    def results(mode, final, rows):
        y = formula(s[:rows], w, mode, got["x"].dtype)
        loss = (y * got["dy"][:rows]).sum() + residual * (s * got["ds"])[:rows].sum()
        wanted = {name: t for name, t in (("dx", s), ("dw", w)) if t is not None}
        found = {name + final: grad for name, grad in zip(wanted, torch.autograd.grad(loss, wanted.values()))}
        return found | {"dx" + final: found["dx" + final][:rows]} | ({} if final else {"y": y.detach()})

    def of_mode(mode):
        return results(mode, "", len(s)) | results(mode, "_final", few) | ({"s": s.detach()} if residual else {})

    expected = of_mode(mode)
    for name, truth in expected.items():
        # fp32 and fp64 may round to neighbouring 16-bit values; the larger tolerance allows for it.
        exact = got[name].dtype == torch.float32 and (got["x"].dtype == torch.float32 or not mode & 2)
        tolerance = 2e-5 if exact else 4e-3
        torch.testing.assert_close(got[name].double(), truth, rtol=tolerance, atol=tolerance)
    if got["x"].dtype == torch.float16 and mode & 1:
        # The tolerance would hide rounding in the wrong place, so results must be closer to their own mode.
        other = of_mode(mode ^ 2)
        for name in ("y", "dw"):
            ours, theirs = (torch.linalg.vector_norm(got[name] - t[name]) for t in (expected, other))
            assert ours < theirs, name
