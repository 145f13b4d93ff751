from __future__ import annotations

import torch
from torch import Tensor

from ._operator import demand, operator, widened


@operator(choices={"activation": ("silu", "none")})
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    dilation: int = 1,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Tensor:
    """A depthwise causal convolution over time, and silu: the short convolution before a linear recurrence.

    x: (B, S, C), weight: (C, W) in x's dtype or fp32, bias: (C,) in weight's dtype, seq_idx: (B, S) indices, cu_seqlens:
    (N) indices, initial_state: (B, P, C) in x's dtype -> (B, S, C) in x's dtype.

    Every column is convolved with its own W weights, 2 to 8. The last weight multiplies the current row, the one before
    it the row that is `dilation` earlier. `initial_state` holds the P = (W - 1) * dilation rows before the first, which
    are zeros by default.

    Packed samples do not see each other: rows belong to one sample if `seq_idx` has the same number for them, or, with
    B = 1, if they lie between the same two entries of `cu_seqlens`, [0, ..., S], which do not descend. `seq_idx` holds
    32-bit numbers. On CPU other values are an error; on CUDA they are not checked, and rows may then see other samples.
    `initial_state` precedes the first sample.

    With a weight of x's dtype, the convolution is rounded before silu. `activation` is "silu" or "none".

    Cost: forward moves 2 |x|, backward 3 |x|. Backward needs x, the weight and the bias. x may be a slice of the columns
    of a wider projection without a copy.

    >>> causal_conv1d(torch.ones(1, 3, 1), torch.tensor([[1.0, 2.0]]), activation="none").flatten()
    tensor([2., 3., 3.])
    """
    demand(x.dim() == 3, "causal_conv1d", "x", "have shape (B, S, C)", tuple(x.shape))
    demand(2 <= weight.shape[-1] <= 8, "causal_conv1d", "weight", "have 2 to 8 columns", weight.shape[-1])
    demand(dilation >= 1, "causal_conv1d", "dilation", "be positive", dilation)
    demand(seq_idx is None or cu_seqlens is None, "causal_conv1d", "cu_seqlens", "be None beside seq_idx", "both")
    batch, length, columns = x.shape
    width = weight.shape[1]
    past = (width - 1) * dilation
    before = x.new_zeros(batch, past, columns) if initial_state is None else initial_state
    rows, taps = torch.cat([widened(before), widened(x)], 1), widened(weight)
    sample = seq_idx
    if cu_seqlens is not None:
        time = torch.arange(length, device=x.device)
        sample = torch.searchsorted(cu_seqlens.to(time.dtype), time, right=True)[None]
    if sample is not None and length:
        sample = torch.cat([sample[:, :1].expand(batch, past), sample.expand(batch, length)], 1)
    out = torch.zeros_like(rows[:, past:])
    for k in range(width):
        shifted = rows[:, k * dilation : k * dilation + length]
        if sample is not None and length:
            same = sample[:, k * dilation : k * dilation + length] == sample[:, past:]
            shifted = torch.where(same[..., None], shifted, 0)
        out = out + taps[:, k] * shifted
    out = out if bias is None else out + widened(bias)
    if activation == "none":
        return out.to(x.dtype)
    if weight.dtype == x.dtype:
        out = widened(out.to(x.dtype))
    return torch.nn.functional.silu(out).to(x.dtype)
