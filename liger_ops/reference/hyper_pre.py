from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._operator import demand, operator, widened


class HyperConnection(NamedTuple):
    """What enters a block, and the numbers by which `hyper_post` adds what leaves it; without columns if there are none."""

    x: Tensor
    post: Tensor
    comb: Tensor


@operator(rows=1, forward_out_dims=(0, 0, 0, 0, 0))
def hyper_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_eps: float,
    eps: float,
    sinkhorn: int = 20,
    post_scale: float = 2.0,
    post_eps: float = 0.0,
) -> HyperConnection:
    """The way into a block with hyper-connections: the sum of a token's streams by weights that depend on them, as in
    DeepSeek-V4.

    streams: (..., 4, n), fn: (24, 4 n), base: (24,), scale: (3,), the last three in fp32 or streams' dtype -> x (..., n) in
    streams' dtype, post (..., 4) and comb (..., 4, 4) in fp32.

    There may be another number N of streams, and fn has P rows: N, 2 N or N (2 + N), for 1, 2 or 3 numbers in scale. With ``l = (streams.flatten(-2) @ fn.T) * rsqrt(mean square of the streams + norm_eps)``, in fp32, the first N columns give
    ``pre = sigmoid(l * scale[0] + base) + eps``, and x is the sum of ``pre[i] * streams[i]`` with one rounding. P = 2 N
    columns also give ``post = post_scale * sigmoid(l * scale[1] + base) + post_eps``. P = N (2 + N) columns also give comb,
    N x N: ``softmax(l * scale[2] + base, -1) + eps``, whose columns and rows are divided by their sums + eps in turn:
    columns first, then `sinkhorn` - 1 times rows and columns. A result that P has no columns for has none itself.

    Kernels serve 4 streams. For another number, CUDA tensors are computed by several operations of PyTorch.

    Cost: forward moves |streams| + |x|, backward 3 |streams| + 2 |x|. Backward needs streams, the parameters and P + 1 numbers
    per token.

    >>> hyper_pre(torch.ones(2, 3), torch.zeros(2, 6), torch.zeros(2), torch.ones(1), 1e-6, 0.0).x
    tensor([1., 1., 1.])
    """
    demand(streams.dim() >= 2, "hyper_pre", "streams", "have at least two dimensions", tuple(streams.shape))
    count, width = streams.shape[-2], fn.shape[0]
    rows = (count, 2 * count, count * (2 + count))
    demand(width in rows, "hyper_pre", "fn", f"have {rows[0]}, {rows[1]} or {rows[2]} rows for {count} streams", width)
    groups = rows.index(width) + 1
    demand(tuple(scale.shape) == (groups,), "hyper_pre", "scale", f"have shape [{groups}]", [*scale.shape])
    demand(sinkhorn >= 1, "hyper_pre", "sinkhorn", "lie in [1, 1000]", sinkhorn)
    s = widened(streams)
    flat = s.flatten(-2)
    logits = flat @ fn.to(s.dtype).T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    sizes = (count, count, count * count)[:groups]
    u = [
        part * factor + shift
        for part, factor, shift in zip(
            logits.split(sizes, -1), scale.to(s.dtype).unbind(), base.to(s.dtype).split(sizes)
        )
    ]
    x = ((torch.sigmoid(u[0]) + eps).unsqueeze(-1) * s).sum(-2).to(streams.dtype)
    post = torch.sigmoid(u[1]) * post_scale + post_eps if groups > 1 else logits[..., :0]
    if groups < 3:
        return HyperConnection(x, post, logits[..., :0].unsqueeze(-1)[..., :0])
    comb = torch.softmax(u[2].unflatten(-1, (count, count)), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return HyperConnection(x, post, comb)
