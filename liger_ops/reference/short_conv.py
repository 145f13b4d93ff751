from __future__ import annotations

from torch import Tensor

from ._operator import demand, operator, widened
from .causal_conv1d import causal_conv1d


@operator()
def short_conv(
    bcx: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """A gated short convolution, as Lfm2 has it: C times the depthwise causal convolution over time of B times x.

    bcx: (B, S, 3 C), weight: (C, W) in bcx's dtype or fp32, bias: (C,) in weight's dtype, seq_idx: (B, S) indices,
    cu_seqlens: (N) indices -> (B, S, C) in bcx's dtype.

    The columns of bcx are those of B, then of C, then of x: the result of one projection. B times x, the convolution and
    the result are rounded to bcx's dtype.

    Every column is convolved with its own W weights, 2 to 8; the last one multiplies the current row. Packed samples do
    not see each other: `seq_idx` and `cu_seqlens` are those of `causal_conv1d`.

    Cost: forward moves 4/3 |bcx|, backward 7/3 |bcx|. Backward needs bcx, the weight and the bias.

    >>> bcx = torch.tensor([[[1.0, 10.0, 1.0], [1.0, 10.0, 2.0]]])
    >>> short_conv(bcx, torch.tensor([[1.0, 2.0]])).flatten()
    tensor([20., 50.])
    """
    demand(bcx.dim() == 3 and bcx.shape[-1] % 3 == 0, "short_conv", "bcx", "have shape (B, S, 3 * C)", tuple(bcx.shape))
    b, c, x = bcx.chunk(3, -1)
    rows = (widened(b) * widened(x)).to(bcx.dtype)
    v = causal_conv1d.reference(rows, weight, bias, "none", seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    return (widened(c) * widened(v)).to(bcx.dtype)
