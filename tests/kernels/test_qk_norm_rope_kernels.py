"""The kernels of qk_norm_rope, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases
from rotations import reference_qk_norm_rope as reference

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.rope.qk_norm_rope
from interpreter import find

TYPES = {"fp32": torch.float32, "fp16": torch.float16}
B, S = 2, 3

def strides(*tensors):
    return [s for t in tensors for s in t.stride()[:3]]

def run(path, D, R, aligned, interleaved, sections=0, heads=(5, 2), of_rows="fp32", of_weight="fp32", mode=7):
    choices = {"X": of_rows, "W": of_weight, "A": "fp32", "INTERLEAVED": interleaved}
    half, rest = R // 2, (D - R + 1) // 2
    forward, backward = (
        find(k).pick(choices, 2 * (half + rest), aligned) for k in ("qk_norm_rope_fwd", "qk_norm_rope_bwd"))
    torch.manual_seed(0)
    H, K = heads
    q, k = (3 * torch.randn(B, S, H, D)).to(TYPES[of_rows]).transpose(1, 2), torch.randn(B, K, S, D).to(TYPES[of_rows])
    grad_q, grad_k = torch.randn_like(q), torch.randn(B, S, K, D).to(TYPES[of_rows]).transpose(1, 2)
    q_weight, k_weight = (torch.randn(D).to(TYPES[of_weight]) for _ in "qk")
    cos, sin = torch.randn(3, B, S, R), torch.randn(3, B, S, R)
    first, second, section = (R // 8, 3 * R // 8, cos.stride(0)) if sections else (half, half, 0)
    saved = dict(q=q, k=k, grad_q=grad_q.clone(), grad_k=grad_k.clone(), q_weight=q_weight, k_weight=k_weight,
                 cos=cos, sin=sin)
    sizes = [S, H, K, half, rest, D, first, second]
    angles = [*cos.stride()[1:3], section, 1e-6, 0.5]
    out_q, out_k = torch.full_like(q, float("nan")), torch.full_like(k, float("nan"))
    splits = 2 if K == 3 else 1
    forward.kernel.function[(B * S * splits,)](
        out_q, out_k, q, k, q_weight, k_weight, cos, sin, *sizes, splits, *strides(out_q, out_k, q, k), *angles, mode << 2,
        **forward.constexprs)
    saved |= dict(out_q=out_q, out_k=out_k)
    for name, programs in (("", 3), ("in place ", 1)):
        in_place = bool(name)
        dq, dk = (grad_q, grad_k) if in_place else (torch.full_like(t, float("nan")) for t in (q, k))
        partial = torch.full((2, programs, D), float("nan"))
        backward.kernel.function[(programs,)](
            dq, dk, partial, grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, B * S, *sizes,
            *strides(dq, dk, grad_q, grad_k, q, k), *angles, mode << 2 | 32 * (not in_place), **backward.constexprs)
        assert in_place == bool(partial.isnan().all())
        saved |= {name + "dq": dq, name + "dk": dk}
        if not in_place:
            saved |= dict(zip(("dq_weight", "dk_weight"), partial.sum(1)))
    numpy.savez(path, **{name: t.contiguous().numpy() for name, t in saved.items()})
"""
SIZES = [(32, 32, True), (64, 32, True), (96, 96, True), (128, 64, True), (320, 320, True)]
SIZES += [(20, 20, False), (33, 20, False), (160, 24, False), (600, 100, False), (16, 0, False)]
QUICK = [(*size, i % 2) for i, size in enumerate(SIZES)] + [(64, 64, True, 0, 1), (48, 40, False, 1, 1)]
THOROUGH = [(*size, i) for size in SIZES for i in (0, 1)] + [(64, 64, True, 1, 1), (48, 40, False, 0, 1)]
# More heads than a block, and without the heads of q or k.
QUICK += [(64, 64, True, 0, 0, heads) for heads in [(37, 3), (0, 3), (3, 0)]]
# Half precision, in each casting mode, without either weight.
QUICK += [(64, 64, True, 0, 0, (5, 2), "fp16", w, mode) for w in ("fp16", "fp32") for mode in (7, 3)]
QUICK += [(64, 48, True, 1, 0, (5, 2), "fp16", "fp16", mode) for mode in (0, 1, 2, 6)]


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    """Forward; backward in three programs, and in place of the incoming gradients."""
    got, rotated, interleaved = interpreted, case[1], bool(case[3])
    sections, _, of_rows, _, mode = (*case[4:], *(0, (5, 2), "fp32", "fp32", 7)[len(case) - 4 :])
    names = ["q", "k", *(["q_weight"] if mode & 1 else []), *(["k_weight"] if mode & 2 else [])]
    options = dict(
        interleaved=interleaved, mrope_section=[rotated // 8, rotated // 4, rotated // 8] if sections else None
    )

    def results(cos, sin, grad_q, grad_k, *given):
        inputs = dict(zip(names, given))
        angles = (cos, sin) if sections else (cos[0], sin[0])
        weights = inputs.get("q_weight"), inputs.get("k_weight")
        outs = reference(inputs["q"], inputs["k"], *weights, *angles, 1e-6, 0.5, **options)
        grads = torch.autograd.grad(outs, given, [grad_q, grad_k])
        found = dict(zip(("out_q", "out_k", *(f"d{name}" for name in names)), (*outs, *grads)))
        return found | {f"in place d{name}": found[f"d{name}"] for name in "qk"}

    wanted = ["out_q", "out_k", *(f"d{name}" for name in names), *(f"in place d{name}" for name in "qk")]
    inputs = [got[name] for name in ("cos", "sin", "grad_q", "grad_k", *names)]
    # Between the norm and the rotation, values have the dtype of the rows.
    precision = torch.float32 if of_rows == "fp32" else torch.float16
    assert_as_the_formula([(name, got[name]) for name in wanted], results, inputs, precision)
