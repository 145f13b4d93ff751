"""The formula of rms_norm, which several operators contain, and the magnitude of the terms of a norm's gradients."""

import torch
from torch import Tensor

from liger_ops._accuracy import compute_dtype


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
):
    compute = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(compute) * torch.rsqrt(x.to(compute).square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting_mode == "llama":
        normed = normed.to(x.dtype).to(compute)
    return (normed * (weight.to(compute) + offset)).to(x.dtype)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    activation: str = "silu",
    *,
    gate_first: bool = False,
    group_size: int | None = None,
):
    compute = torch.promote_types(x.dtype, torch.float32)
    act = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    wide, by = x.to(compute), act(gate.to(compute))
    rows = wide * by if gate_first else wide
    normed = rms_norm(rows.unflatten(-1, (-1, group_size or x.shape[-1])), None, eps).flatten(-2)
    if casting_mode == "llama":
        normed = normed.to(x.dtype)
    if weight is not None:
        normed = normed.to(compute) * (weight.to(compute) + offset)
    if casting_mode == "llama":
        # As in transformers: two half-precision factors have such a product, and a wider weight makes it wider.
        normed = normed.to(x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype))
    if gate_first:
        return normed if casting_mode == "llama" else normed.to(x.dtype)
    return (normed.to(compute) * by).to(x.dtype)


@torch.no_grad()
def terms(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, centred: bool = False) -> float:
    """Of the gradients of rows, for upstream gradients of 1. Few columns leave little or nothing of them: one column has
    no variance, and its gradient is zero."""
    if x.numel() == 0:
        return 0.0
    rows = x.double()
    rows = rows - rows.mean(-1, keepdim=True) if centred else rows
    factor = 1.0 if weight is None else float((weight.double() + offset).abs().max())
    return factor * float((rows.square().mean(-1) + eps).rsqrt().max())


def noise(outputs: int, rows: list[Tensor], x: Tensor, weight: Tensor | None, eps: float, **options) -> list[float]:
    """For test_properties.py: the rounding of those terms. rows: the inputs whose gradients are those of x."""
    error = 2 * torch.finfo(compute_dtype([x])).eps * terms(x.detach(), weight, eps, **options)
    return [0.0] * outputs + [error for t in rows if t.requires_grad]
