"""A depthwise causal convolution over time, by torch."""

import torch
from torch.nn import functional


def reference(x, weight, bias=None, state=None, activation="silu", dilation=1, lengths=None):
    """lengths: of the samples, one after the other."""
    if lengths:
        parts = x.split(lengths, 1)
        first = reference(parts[0], weight, bias, state, activation, dilation)
        rest = [reference(part, weight, bias, None, activation, dilation) for part in parts[1:]]
        return torch.cat([first, *rest], 1)
    past = (weight.shape[1] - 1) * dilation
    before = x.new_zeros(len(x), past, x.shape[2]) if state is None else state
    dtype = torch.promote_types(x.dtype, weight.dtype)
    rows = torch.cat([before, x], 1).transpose(1, 2).to(dtype)
    y = functional.conv1d(rows, weight[:, None], bias, dilation=dilation, groups=x.shape[2]).transpose(1, 2)
    return (functional.silu(y) if activation == "silu" else y).to(x.dtype)
