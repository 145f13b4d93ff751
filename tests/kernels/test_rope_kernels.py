"""The rope kernel, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases
from rotations import reference, reference_freqs_cis

INTERPRETED_MODES = [(0, "plain"), (1, "plain"), (0, "sections"), (1, "sections"), (1, "complex")]
INTERPRETED_SIZES = [
    (32, 32, True),
    (64, 48, True),
    (96, 96, True),
    (320, 320, True),
    (64, 24, False),
    (160, 160, False),
]

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.rope.rope
from interpreter import find

B, H, K, S = 2, 5, 2, 3

def run(path, D, R, aligned, interleaved, mode):
    torch.manual_seed(0)
    variant = find("rope").pick({"X": "fp32", "W": "fp32", "INTERLEAVED": interleaved}, R, aligned)
    q, k = torch.randn(B, S, H, D).transpose(1, 2), torch.randn(B, K, S, D)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    cos, sin = torch.randn(3, B, S, R), torch.randn(3, B, S, R)
    first, second, section, flags = R // 2, R // 2, 0, 0
    if mode == "sections":
        first, second, section = R // 8, 3 * R // 8, cos.stride(0)
    if mode == "complex":
        sin, flags = cos, 2
    kept = dict(q=q, k=k, dq=dq.clone(), dk=dk.clone(), cos=cos, sin=sin)

    def launch(out_q, out_k, q, k, width, flags, groups):
        strides = [s for t in (out_q, out_k, q, k) for s in t.stride()[:3]]
        variant.kernel.function[(B * S, groups)](
            out_q, out_k, q, k, cos, sin, S, H, K, R // 2, width, first, second, *strides, *cos.stride()[1:3], section,
            flags, INTERLEAVED=interleaved, **variant.config.constexprs)

    out_q, out_k = torch.full_like(q, float("nan")), torch.full_like(k, float("nan"))
    launch(out_q, out_k, q, k, D, flags, 2)
    launch(dq, dk, dq, dk, R, flags | 1, 1)
    saved = dict(**kept, out_q=out_q, out_k=out_k, got_q=dq, got_k=dk)
    numpy.savez(path, **{name: t.contiguous().numpy() for name, t in saved.items()})
"""
QUICK = [(*size, *mode) for size in INTERPRETED_SIZES for mode in INTERPRETED_MODES]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    """Forward with two groups of heads, and the inverse rotation in place."""
    _, rotated, _, interleaved, mode = case
    got = interpreted

    def results(q, k, cos, sin, dq, dk):
        if mode == "complex":
            outs = reference_freqs_cis(q, k, torch.view_as_complex(cos[0].unflatten(-1, (-1, 2)).detach()))
        elif mode == "sections":
            outs = reference(q, k, cos, sin, bool(interleaved), [rotated // 8, rotated // 4, rotated // 8])
        else:
            outs = reference(q, k, cos[0], sin[0], bool(interleaved))
        return dict(zip(("out_q", "out_k", "got_q", "got_k"), (*outs, *torch.autograd.grad(outs, [q, k], [dq, dk]))))

    ours = [(name, got[name]) for name in ("out_q", "out_k", "got_q", "got_k")]
    assert_as_the_formula(ours, results, [got[name] for name in ("q", "k", "cos", "sin", "dq", "dk")])
