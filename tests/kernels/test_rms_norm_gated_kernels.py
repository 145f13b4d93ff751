"""The rms_norm_gated kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.norms.rms_norm_gated
from interpreter import find

TYPES = {"fp32": torch.float32, "fp16": torch.float16}

def run(path, n, aligned, of_rows="fp32", of_weight="fp32", mode=1, groups=1, of_result=None, rows=9):
    choices = {"X": of_rows, "W": of_weight, "Y": of_result or of_rows}
    has_weight, offset, width = mode & 1, 0.5 * (mode & 1), n * groups
    two_levels = 2, (2 * width, width)
    inner, strides = (0, (0, width)) if aligned else two_levels
    forward, backward = (find(k).pick(choices, n, aligned) for k in ("rms_norm_gated_fwd", "rms_norm_gated_bwd"))
    torch.manual_seed(0)
    x, gate = (torch.randn(rows, width).to(TYPES[of_rows]) for _ in range(2))
    dy = torch.randn(rows, width).to(TYPES[choices["Y"]])
    w = torch.randn(width).to(TYPES[of_weight])
    nan = float("nan")
    y, rstd = torch.full_like(dy, nan), torch.full((rows, groups), nan)
    blocks = -(-rows // forward.config.constexprs["BLOCK_M"])
    forward.kernel.function[(blocks * groups,)](
        y, rstd, x, gate, w, rows, n, groups, inner, *strides * 3, 0.25, offset, mode | 8, **forward.constexprs)
    assert not rstd.isnan().any()
    # In the interpreter, a loop over rows counts in Python integers, which the kernel takes in two levels only.
    inner, strides = two_levels
    got, few = {}, min(rows, backward.config.constexprs["BLOCK_M"])
    for name, programs, count, final in (("", 2, rows, 0), ("_final", 1, few, 128)):
        for needs in (16 | 32 | 64 * has_weight, *((16, 32) if final and n < 1000 else ())):
            dx, dgate, dw, partial = (torch.full_like(t, nan) for t in (x, gate, w, torch.empty(2, width)))
            backward.kernel.function[(programs * groups,)](
                dx, dgate, dw, partial, dy, x, gate, w, rstd, count, n, groups, inner, *strides * 5, offset,
                mode | needs | final, **backward.constexprs)
            found = {"dx": dx[:count], "dgate": dgate[:count]}
            if has_weight:
                found["dw"] = dw if final else partial.sum(0)
            untouched = [partial if final else dw, dx[count:], dgate[count:]]
            untouched += [t for t, bit in ((dx, 16), (dgate, 32), (dw, 64)) if not needs & bit]
            assert all(t.isnan().all() for t in untouched)
            if needs & 48 == 48:
                got |= {key + name: t for key, t in found.items()}
            else:
                key = "dx" if needs & 16 else "dgate"
                assert torch.equal(found[key], got[key + name])
    numpy.savez(path, x=x, gate=gate, w=w, dy=dy, y=y, **{key: t.numpy() for key, t in got.items()})
"""
# Modes: 1 has a weight, 2 rounds rows, 4 rounds products, 256 gates first, 512 sigmoid.
MODES = [0, 1, 2, 7, 259, 513, 769, 771]
# One tile and several, aligned and unaligned, a loop in backward and in both; rows that load ahead.
QUICK = [(40, True, "fp32", "fp32", 1), (2560, True, "fp32", "fp32", 257), (60, False), (700, False, "fp32", "fp32", 257)]
QUICK += [(40, True, "fp16", "fp16", mode) for mode in MODES]
QUICK += [(40, True, "fp16", "fp32", 3), (40, True, "fp16", "fp32", 259, 1, "fp32")]
QUICK += [(7000, True, "fp16", "fp16", 7), (13_000, True, "fp32", "fp32", 513)]
# Groups, in one tile and in a loop.
QUICK += [(40, True, "fp16", "fp16", 259, 3), (33, False, "fp32", "fp32", 513, 2), (600, False, "fp16", "fp16", 7, 3)]
THOROUGH = [(n, True) for n in (128, 1024, 4000, 17_000)]
THOROUGH += [(n, True, "fp16", "fp16", 259) for n in (5000, 8000, 12_288, 16_384)]
THOROUGH += [(60, False, "fp16", "fp16", mode, 2) for mode in MODES]


def formula(x, gate, w, mode, dtype, groups):
    """In fp64, except for the modes' roundings, which are the identity in backward. Epsilon is large, so that it
    matters."""

    def rounded(t, bit):
        return t + (t.to(dtype) - t).detach() if mode & bit else t

    a = torch.sigmoid(gate) if mode & 512 else gate * torch.sigmoid(gate)
    v = (x * a if mode & 256 else x).unflatten(-1, (groups, -1))
    normed = rounded((v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 0.25)).flatten(-2), 2)
    product = rounded(normed if w is None else normed * (w + 0.5), 4)
    return product if mode & 256 else product * a


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    """Runs the kernels on CPU tensors and checks every gradient."""
    got = interpreted
    mode, groups = (*case[4:6], *(1, 1)[len(case[4:6]) :])
    few = len(got["dx_final"])  # rows that one program processes per step
    dtype = got["x"].dtype

    def results(x, gate, w, dy, mode=mode):
        weight = w if mode & 1 else None
        found, parameters = {"y": formula(x, gate, weight, mode, dtype, groups)}, [w] * (mode & 1)
        for final, rows in (("", len(x)), ("_final", few)):
            y = formula(x[:rows], gate[:rows], weight, mode, dtype, groups)
            dx, dgate, *dw = torch.autograd.grad((y * dy[:rows]).sum(), [x, gate, *parameters])
            found |= {f"dx{final}": dx[:rows], f"dgate{final}": dgate[:rows], **({f"dw{final}": dw[0]} if dw else {})}
        return found

    inputs = [got[name] for name in ("x", "gate", "w", "dy")]
    wanted = ["y", *(f"{name}{final}" for name in ("dx", "dgate", *["dw"] * (mode & 1)) for final in ("", "_final"))]
    # A row or product that is rounded may be rounded either way.
    precision = dtype if mode & 6 else torch.float32
    assert_as_the_formula([(name, got[name]) for name in wanted], results, inputs, precision)
    if dtype == torch.float16 and mode & 2:
        # The tolerance would hide rounding in the wrong place, so results must be closer to their own mode.
        wide = [t.double().requires_grad_() for t in inputs]
        for other in {mode ^ 2, mode ^ (4 if mode & 4 else 2)}:
            expected, others = results(*wide), results(*wide, mode=other)
            ours, theirs = (torch.linalg.vector_norm(got["y"] - t["y"].detach()) for t in (expected, others))
            assert ours < theirs, other
