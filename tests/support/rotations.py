"""Helpers that the tests of rope and qk_norm_rope share: formulas, inputs and layouts."""

import torch
from torch import Tensor

from liger_ops import functional


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, mrope_section=None, trailing=False,
    halves_out=False,
):  # fmt: skip
    """Casts the angles to the dtype of q, as eager models do."""
    cos, sin = (t.to(q.dtype) for t in (cos, sin))
    together = (interleaved or trailing) and not halves_out  # of the pairs in the results
    if mrope_section is not None:
        cos, sin = (by_section(t, mrope_section, together, trailing) for t in (cos, sin))
    if trailing:
        cos, sin = (t.repeat_interleave(2, -1) if together else torch.cat([t, t], -1) for t in (cos, sin))
    cos, sin = (t.unsqueeze(-3) for t in (cos, sin))
    width = cos.shape[-1]

    def apply(x: Tensor) -> Tensor:
        first = x.shape[-1] - width if trailing else 0
        head = x[..., first : first + width]
        if halves_out:
            head = torch.cat([head[..., ::2], head[..., 1::2]], -1)
        turned = head * cos + rotate(head, together) * sin
        return torch.cat((x[..., :first], turned, x[..., first + width :]), -1)

    return apply(q), apply(k)


def by_section(t: Tensor, sections, interleaved: bool, one_per_pair: bool = False) -> Tensor:
    """t: (3, ..., R) -> (..., R). The section of a column selects the first index."""
    which = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    if not one_per_pair:
        which = which.repeat_interleave(2) if interleaved else which.repeat(2)
    return torch.stack([t[w, ..., i] for i, w in enumerate(which.tolist())], -1)


def reference_freqs_cis(q: Tensor, k: Tensor, freqs_cis: Tensor):
    def apply(x: Tensor) -> Tensor:
        compute = torch.promote_types(x.dtype, torch.float32)
        width = 2 * freqs_cis.shape[-1]
        pairs = torch.view_as_complex(x[..., :width].to(compute).unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * freqs_cis.unsqueeze(-3).to(pairs.dtype)).flatten(-2)
        return torch.cat((turned.to(x.dtype), x[..., width:]), -1)

    return apply(q), apply(k)


def heads(batch, count, sequence, size, dtype, device, requires_grad=True):
    """(B, H, S, D), with the memory layout (B, S, H, D) that attention produces."""
    x = torch.randn(batch, sequence, count, size, dtype=dtype, device=device).transpose(1, 2)
    return x.requires_grad_(requires_grad)


def angles(*shape, dtype=torch.float32, device="cpu"):
    """The halves of a row differ, unlike in models, to catch code that reads the wrong half."""
    phase = torch.rand(shape, device=device) * 6.3
    return phase.cos().to(dtype), phase.sin().to(dtype)


ANGLE_LAYOUTS = {
    "slice of a longer table": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "slice of wider rows": lambda t: torch.cat([t, t], 2)[..., : t.shape[2]],
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "misaligned": lambda t: torch.cat([t.flatten(), t.new_zeros(1)]).roll(1)[1:].view(t.shape),
    "expanded": lambda t: t[:1].expand_as(t),
}


LAYOUTS = {
    "positions first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads first": lambda x: x.contiguous(),
    "slice of a fused projection": lambda x: torch.cat([x.transpose(1, 2)] * 3, 2)[:, :, 1 : 1 + x.shape[1]].transpose(
        1, 2
    ),
    "without the last position": lambda x: torch.cat([x, x[:, :, :1]], 2)[:, :, :-1],
    "slice of longer heads": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "strided columns": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "misaligned": lambda x: torch.cat([x.flatten(), x.new_zeros(1)]).roll(1)[1:].view(x.shape),
    "expanded heads": lambda x: x[:, :1].expand_as(x),
}


class Probe(torch.autograd.Function):
    """Copies its inputs and records the addresses of gradients, either before or after `rope`."""

    @staticmethod
    def forward(ctx, seen: list, fresh: bool, *tensors: Tensor):
        ctx.seen, ctx.fresh = seen, fresh
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        passed = tuple(g.clone() if ctx.fresh else g for g in gradients)
        ctx.seen.append([g.data_ptr() for g in passed])
        return None, None, *passed


def reference_qk_norm_rope(
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps=1e-6,
    offset=0.0,
    casting_mode="llama",
    interleaved=False,
    mrope_section=None,
):
    q, k = (functional.rms_norm.reference(x, w, eps, offset, casting_mode) for x, w in ((q, q_weight), (k, k_weight)))
    return reference(q, k, cos, sin, interleaved, mrope_section)
