"""Bits of quantised tensors, to be compared."""

import math

import torch
from torch import Tensor


def as_bits(t: Tensor) -> Tensor:
    """NaN has one form only: its sign depends on the device."""
    if t.dtype == torch.float32:
        return torch.where(t.isnan(), math.nan, t).view(torch.int32)
    bits = t.view(torch.uint8)
    return torch.where((bits & 0x7F) == 0x7F, 0x7F, bits)
