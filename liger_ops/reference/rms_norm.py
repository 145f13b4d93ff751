from __future__ import annotations

import math

import torch
from torch import Tensor

from ._operator import demand, operator, widened


@operator(rows=1, forward_out_dims=(0, 0), choices={"casting_mode": ("llama", "gemma", "none")})
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama"
) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension.

    x: (..., n), weight: (n,). `casting_mode` selects where half-precision rows are rounded: "llama" before and after
    the multiplication by the weight, "gemma" and "none" only after it. :class:`liger_ops.nn.RMSNorm` has the defaults of
    torch instead: its `eps` is None and its casting mode "gemma".

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> rms_norm(x, torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    demand(0 <= eps < math.inf, "rms_norm", "eps", "be finite and not negative", eps)
    normed = widened(x) * torch.rsqrt(widened(x).square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting_mode == "llama":
        normed = widened(normed.to(x.dtype))
    return (normed * (widened(weight) + offset)).to(x.dtype)
