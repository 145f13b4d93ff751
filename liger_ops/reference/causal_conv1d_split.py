from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._operator import demand, operator
from .causal_conv1d import causal_conv1d


@operator(choices={"activation": ("silu", "none")}, views={3: "x"})
def causal_conv1d_split(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    sizes: Sequence[int],
    groups: int = 1,
    dilation: int = 1,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`causal_conv1d` of a projection to queries, keys, values and gates, each of which becomes a tensor.

    x: (B, S, n), weight: (m, W) in x's dtype or fp32, bias: (m,) in weight's dtype, seq_idx: (B, S) indices, cu_seqlens:
    (N) indices, initial_state: (B, P, m) in x's dtype -> q, k, v: (B, S, groups * size), z: (B, S, groups, size) in x's
    dtype.

    The columns of x are `groups` times [q, k, v, z], or [q, k, v] with three `sizes`; then z has no columns. Qwen3-Next has
    a group for each key head. The m channels of the weight, the bias and the state are all those of q, then those of k,
    then those of v. q, k and v are contiguous. z is a view of x, which is not convolved and must not be written to.

    Other arguments are those of `causal_conv1d`.

    Cost: forward moves 2 |q, k, v|, backward 3 |q, k, v| + 2 |z|. Backward needs x, the weight and the bias, and writes the
    gradients of all results into one tensor.

    >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    >>> q, k, v, z = causal_conv1d_split(x, torch.ones(3, 2), activation="none", sizes=[1, 1, 1, 1])
    >>> v, z
    (tensor([[[3.]]]), tensor([[[[4.]]]]))
    """
    name, pitch = "causal_conv1d_split", sum(sizes)
    demand(x.dim() == 3, name, "x", "have shape (B, S, C)", tuple(x.shape))
    fits = len(sizes) in (3, 4) and min(sizes) >= 0
    demand(fits, name, "sizes", "be 3 or 4 numbers of columns: of q, k, v and z", list(sizes))
    demand(groups >= 1, name, "groups", "be positive", groups)
    columns = groups * pitch
    demand(x.shape[2] == columns, name, "x", f"have groups * sum(sizes) = {columns} columns", tuple(x.shape))
    *parts, z = x.unflatten(2, (groups, pitch)).split([*sizes, 0][:4], 3)
    channels = torch.cat([part.flatten(2) for part in parts], 2)
    options: dict[str, Any] = dict(
        dilation=dilation, seq_idx=seq_idx, cu_seqlens=cu_seqlens, initial_state=initial_state
    )
    y = causal_conv1d.reference(channels, weight, bias, activation, **options)
    q, k, v = (part.contiguous() for part in y.split([groups * size for size in sizes[:3]], 2))
    return q, k, v, z
