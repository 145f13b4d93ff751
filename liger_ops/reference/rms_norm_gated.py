from __future__ import annotations

import math

import torch
from torch import Tensor

from ._operator import demand, operator, widened


@operator(
    rows=2,
    forward_out_dims=(0, 0),
    choices={"casting_mode": ("llama", "gemma", "none"), "activation": ("silu", "sigmoid")},
)
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
) -> Tensor:
    """``rms_norm(x) * (weight + offset) * activation(gate)``, the norm after a linear recurrence.

    x: (..., n), gate: (..., n), weight: (n,) in x's dtype or fp32 -> (..., n) in x's dtype.

    `activation` is "silu" or "sigmoid". With `gate_first`, the gate is applied before the norm: ``rms_norm(x *
    activation(gate)) * (weight + offset)``. Statistics are of `group_size` neighbouring columns, by default of all.

    `casting_mode` selects where half-precision rows are rounded. "gemma" and "none" round the result alone. "llama" also
    rounds the normalised row, and its product with a weight of x's dtype. With `gate_first` there is no further product:
    then the result of "llama" has the weight's dtype, if that is fp32. Qwen3-Next has "llama", Mamba-2 "llama" with
    `gate_first`, Kimi Linear "gemma" with "sigmoid".

    Cost: forward moves 3 |x|, backward 5 |x|. Backward needs x, the gate, the weight, and an fp32 number per group. The
    gradient of x overwrites the upstream gradient.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> rms_norm_gated(x, torch.zeros(1, 2), torch.ones(2), eps=0.0, activation="sigmoid")
    tensor([[0.4243, 0.5657]])
    """
    demand(0 <= eps < math.inf, "rms_norm_gated", "eps", "be finite and not negative", eps)
    n = x.shape[-1]
    size = n if group_size is None else group_size
    divides = group_size is None or (size > 0 and n % size == 0)
    demand(divides, "rms_norm_gated", "group_size", f"divide the number of columns, {n}", size)
    llama = casting_mode == "llama"
    z = widened(gate)
    act = torch.sigmoid(z) if activation == "sigmoid" else torch.nn.functional.silu(z)
    v = widened(x) * act if gate_first else widened(x)
    groups = v.unflatten(-1, (n // size if size else 1, size))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if llama:
        normed = widened(normed.to(x.dtype))
    dtype = x.dtype
    if weight is not None:
        normed = normed * (widened(weight) + offset)
        if llama and gate_first:
            dtype = torch.promote_types(dtype, weight.dtype)
        elif llama and weight.dtype == x.dtype:
            normed = widened(normed.to(dtype))
    return (normed if gate_first else normed * act).to(dtype)
