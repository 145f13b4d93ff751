"""The rope kernel, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases
from rotations import reference, reference_freqs_cis

# How pairs lie (as in the kernel's table), and the mode.
INTERPRETED_MODES = [(0, "plain"), (1, "plain"), (0, "sections"), (1, "sections"), (1, "complex")]
INTERPRETED_MODES += [(2, "plain"), (2, "sections"), (1, "trailing"), (2, "trailing")]
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
import liger_ops.kernels.rope.rope as rope
from interpreter import find

B, H, K, S = 2, 5, 2, 3

def run(path, D, R, aligned, pairs, mode):
    torch.manual_seed(0)
    variant = find("rope").pick({"X": "fp32", "W": "fp32", "PAIRS": pairs}, R, aligned)
    q, k = torch.randn(B, S, H, D).transpose(1, 2), torch.randn(B, K, S, D)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    cos, sin = torch.randn(3, B, S, R), torch.randn(3, B, S, R)
    first, second, section, flags, apart, start = R // 2, R // 2, 0, 0, R // 2, 0
    if mode == "sections":
        first, second, section = R // 8, 3 * R // 8, cos.stride(0)
    if mode == "complex":
        sin, flags = cos, 2
    if mode == "trailing":
        start = D - R
        if pairs == rope.MIXED.value:
            apart = 0
        else:
            # One table of cos and sin.
            cos = sin = torch.stack([cos[..., : R // 2], sin[..., : R // 2]], -1).flatten(-2)
            flags = 2
    kept = dict(q=q, k=k, dq=dq.clone(), dk=dk.clone(), cos=cos, sin=sin)

    def launch(out_q, out_k, q, k, copied, flags, groups):
        out_q, out_k, q, k = (t[..., start:] for t in (out_q, out_k, q, k))
        strides = [s for t in (out_q, out_k, q, k) for s in t.stride()[:3]]
        variant.kernel.function[(B * S, groups)](
            out_q, out_k, q, k, cos, sin, S, H, K, R // 2, apart, -start if start else R, copied, first,
            second, *strides, *cos.stride()[1:3], section,
            flags, PAIRS=pairs, **variant.config.constexprs)

    out_q, out_k = torch.full_like(q, float("nan")), torch.full_like(k, float("nan"))
    launch(out_q, out_k, q, k, D - R, flags, 2)
    if pairs == rope.MIXED.value:
        got_q, got_k = torch.full_like(q, float("nan")), torch.full_like(k, float("nan"))
        launch(got_q, got_k, dq, dk, D - R, flags | 1 | rope.READS_HALVES.value, 1)
    else:
        got_q, got_k = dq, dk
        launch(dq, dk, dq, dk, 0, flags | 1, 1)
    saved = dict(**kept, out_q=out_q, out_k=out_k, got_q=got_q, got_k=got_k)
    numpy.savez(path, **{name: t.contiguous().numpy() for name, t in saved.items()})
"""
QUICK = [(*size, *mode) for size in INTERPRETED_SIZES for mode in INTERPRETED_MODES]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    """Forward with two groups of heads, and the inverse rotation, in place if the pairs stay."""
    _, rotated, _, pairs, mode = case
    ways = dict(interleaved=pairs == 1, halves_out=pairs == 2)
    got = interpreted

    def results(q, k, cos, sin, dq, dk):
        if mode == "complex":
            outs = reference_freqs_cis(q, k, torch.view_as_complex(cos[0].unflatten(-1, (-1, 2)).detach()))
        elif mode == "sections":
            sections = [rotated // 8, rotated // 4, rotated // 8]
            outs = reference(q, k, cos, sin, mrope_section=sections, **ways)
        elif mode == "trailing":
            half = slice(None, rotated // 2)
            table = (cos[0, ..., ::2], cos[0, ..., 1::2]) if pairs == 1 else (cos[0, ..., half], sin[0, ..., half])
            outs = reference(q, k, *table, trailing=True, **ways)
        else:
            outs = reference(q, k, cos[0], sin[0], **ways)
        return dict(zip(("out_q", "out_k", "got_q", "got_k"), (*outs, *torch.autograd.grad(outs, [q, k], [dq, dk]))))

    ours = [(name, got[name]) for name in ("out_q", "out_k", "got_q", "got_k")]
    assert_as_the_formula(ours, results, [got[name] for name in ("q", "k", "cos", "sin", "dq", "dk")])
