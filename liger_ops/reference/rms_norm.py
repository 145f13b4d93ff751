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

    x: (..., n), weight: (n,) in x's dtype or fp32 -> (..., n) in x's dtype.

    `casting_mode` selects where half-precision rows are rounded: "llama" before and after the multiplication by the
    weight, "gemma" and "none" only after it. "llama" is the default, as in liger-kernel and in most models of
    transformers. :class:`liger_ops.nn.RMSNorm` has the defaults of torch.nn.RMSNorm, which rounds once: its casting
    mode is "gemma" and its `eps` is None. Here `eps` is finite and not negative.

    Cost: forward moves 2 |x|, backward 3 |x|. Backward needs x, the weight, and an fp32 number per row. The gradient of
    x overwrites the upstream gradient.

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
