"""rope and rope_freqs_cis without C++. Heads are made contiguous first, and so are results; the angles of sections and
complex ones are spread out before the rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import autocast, runtime
from .autograd import once_differentiable
from .swiglu import compute_dtype, demand, demand_dtype, empty_contiguous

INVERSE = 1
OPTIONS = "bool interleaved=False, int[]? mrope_section=None"


def check(
    op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Sequence[int] | None, angles: str = "cos"
) -> None:
    allowed = [torch.float32, torch.float16, torch.bfloat16] + ([] if q.is_cuda else [torch.float64])
    demand(
        q.dtype in allowed and q.dim() == 4,
        op,
        "q",
        "be floating-point, (batch, heads, sequence, head size)",
        (q.dtype, q.shape),
    )
    like = k.dim() == 4 and k.shape[0] == q.shape[0] and k.shape[2:] == q.shape[2:]
    like = like and k.dtype == q.dtype and k.device == q.device
    demand(like, op, "k", "match q in all but the number of heads", (k.shape, k.dtype, k.device))
    demand_dtype(op, angles, cos, "q", q)
    demand(cos.device == q.device, op, angles, f"be on {q.device} like q", cos.device)
    demand(sin.shape == cos.shape and sin.dtype == cos.dtype, op, "sin", "match cos", (sin.shape, sin.dtype))
    dims = cos.dim() - (sections is not None)
    fits = dims in (2, 3) and cos.shape[-2] == q.shape[2] and cos.shape[-1] % 2 == 0 and cos.shape[-1] <= q.shape[3]
    fits = fits and (dims == 2 or cos.shape[-3] in (1, q.shape[0])) and (sections is None or cos.shape[0] == 3)
    demand(fits, op, angles, f"fit the batch, the sequence and the head size of q, {tuple(q.shape)}", cos.shape)
    if sections is not None:
        fits = len(sections) == 3 and min(sections) >= 0 and 2 * sum(sections) == cos.shape[-1]
        demand(fits, op, "mrope_section", f"be three sizes that add up to {cos.shape[-1]} / 2", sections)


def by_section(t: Tensor, sections: Sequence[int], interleaved: bool) -> Tensor:
    """t: (3, ..., R) -> (..., R)"""
    which = torch.repeat_interleave(torch.arange(3, device=t.device), torch.tensor(list(sections), device=t.device))
    which = which.repeat_interleave(2) if interleaved else which.repeat(2)
    return torch.gather(t, 0, which.expand(1, *t.shape[1:])).squeeze(0)


def turn(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    """cos, sin: (S, R) or (1 or B, S, R)"""
    width, c = cos.shape[-1], compute_dtype(q)
    if not q.is_cuda:
        runtime.count_cpu_call()
        cos, sin = cos.to(c).unsqueeze(-3), sin.to(c).unsqueeze(-3)
        outs = []
        for x in (q, k):
            head = x[..., :width].to(c)
            turned = -turn(head * sin, interleaved) if inverse else turn(head, interleaved) * sin
            outs.append(torch.cat(((head * cos + turned).to(x.dtype), x[..., width:]), -1).contiguous())
        return outs[0], outs[1]
    q, k, cos, sin = (t.contiguous() for t in (q, k, cos, sin))
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    batch, q_heads, positions, size = q.shape
    if q.numel() + k.numel():
        strides = {
            f"{name}_{level}": t.stride(d)
            for name, t in dict(out_q=out_q, out_k=out_k, q=q, k=k).items()
            for d, level in enumerate(("batch", "head", "position"))
        }
        args = dict(
            out_q=out_q, out_k=out_k, q=q, k=k, cos=cos, sin=sin,
            positions=positions, q_heads=q_heads, k_heads=k.shape[1],
            half=width // 2, width=size, section_1=width // 2, section_2=width // 2, **strides,
            angle_batch=cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0, angle_position=width,
            angle_section=0,
            flags=INVERSE if inverse else 0,
        )  # fmt: skip
        choices = {"X": runtime.dtype_name(q), "W": runtime.dtype_name(cos), "INTERLEAVED": int(interleaved)}
        runtime.launch("rope", "rope", choices, width, lambda _: (batch * positions, 1, 1), args, q.device)
    return out_q, out_k


def spread(cos: Tensor, sin: Tensor, interleaved: bool, sections: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    if sections is None:
        return cos, sin
    return by_section(cos, sections, interleaved), by_section(sin, sections, interleaved)


def register() -> None:
    define = torch.library.custom_op

    def rotate_back(dq, dk, cos, sin, interleaved, mrope_section):
        return rotate(dq, dk, *spread(cos, sin, interleaved, mrope_section), interleaved, True)

    grad = define(
        "liger::_rope_grad", rotate_back, mutates_args=(),
        schema="(Tensor dq, Tensor dk, Tensor cos, Tensor sin, bool interleaved, int[]? mrope_section) "
        "-> (Tensor, Tensor)",
    )  # fmt: skip
    grad.register_fake(lambda dq, dk, *_: (empty_contiguous(dq), empty_contiguous(dk)))

    def rope(q, k, cos, sin, *, interleaved=False, mrope_section=None):
        check("rope", q, k, cos, sin, mrope_section)
        return rotate(q, k, *spread(cos, sin, interleaved, mrope_section), interleaved, False)

    plain = define(
        "liger::rope",
        rope,
        mutates_args=(),
        schema=f"(Tensor q, Tensor k, Tensor cos, Tensor sin, *, {OPTIONS}) -> (Tensor, Tensor)",
    )
    plain.register_fake(lambda q, k, *_, **__: (empty_contiguous(q), empty_contiguous(k)))

    def save(ctx, inputs, keyword_only_inputs, output):
        demand(
            not any(t.requires_grad for t in inputs[2:]),
            "rope",
            "cos and sin",
            "require no gradient",
            "requires_grad=True",
        )
        ctx.save_for_backward(*inputs[2:])
        ctx.options = keyword_only_inputs["interleaved"], keyword_only_inputs["mrope_section"]

    @once_differentiable("rope")
    def backward(ctx, saved, dq, dk):
        return *torch.ops.liger._rope_grad(dq, dk, *saved, *ctx.options), None, None

    plain.register_autograd(backward, setup_context=save)

    def promoted(dtype, q, k, *angles):
        wider = torch.promote_types(q.dtype, k.dtype)
        return q.to(wider), k.to(wider), *(t if t.dtype == wider else t.float() for t in angles)

    autocast.implement("rope", ["cpu", "cuda"], promoted)

    def real(freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(t.repeat_interleave(2, -1) for t in torch.view_as_real(freqs_cis.resolve_conj()).unbind(-1))

    def rope_freqs_cis(q, k, freqs_cis):
        demand(freqs_cis.is_complex(), "rope_freqs_cis", "freqs_cis", "be complex", freqs_cis.dtype)
        check("rope_freqs_cis", q, k, *real(freqs_cis), None, "freqs_cis")
        return rotate(q, k, *real(freqs_cis), True, False)

    complex_rope = define(
        "liger::rope_freqs_cis",
        rope_freqs_cis,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor freqs_cis) -> (Tensor, Tensor)",
    )
    complex_rope.register_fake(lambda q, k, _: (empty_contiguous(q), empty_contiguous(k)))

    def save_complex(ctx, inputs, output):
        demand(not inputs[2].requires_grad, "rope_freqs_cis", "freqs_cis", "require no gradient", "requires_grad=True")
        ctx.save_for_backward(inputs[2])

    @once_differentiable("rope_freqs_cis")
    def complex_backward(ctx, saved, dq, dk):
        return *torch.ops.liger._rope_grad(dq, dk, *real(*saved), True, None), None

    complex_rope.register_autograd(complex_backward, setup_context=save_complex)
