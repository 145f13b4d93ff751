"""The formula of rms_norm, which several operators contain."""

import torch
from torch import Tensor


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
