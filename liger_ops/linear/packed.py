"""Frozen weights of linear layers of bitsandbytes in four bits. They are dequantised for each GEMM that reads them, as
bitsandbytes does for many rows, and never kept."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BITSANDBYTES = "bitsandbytes.nn.modules"


class Packed(NamedTuple):
    """A weight, in the dtype in which its layer computes."""

    data: Tensor
    state: Any  # bitsandbytes' QuantState
    dtype: torch.dtype


def is_linear_4bit(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__name__) == (BITSANDBYTES, "Linear4bit")


def packed(linear: Any, dtype: torch.dtype) -> Packed | str:
    """The weight of a Linear4bit whose input has this dtype, or why the layer must be called."""
    state = getattr(linear.weight, "quant_state", None)
    if state is None:
        return "base is not quantised yet"
    computes = linear.compute_dtype if linear.compute_type_is_set else dtype
    if computes != dtype:
        return f"base computes in {computes}, its input is {dtype}"
    # Older releases stored some weights transposed, and a CPU's own layout has another kernel.
    if tuple(state.shape) != (linear.out_features, linear.in_features) or getattr(
        state, "packing_format_for_cpu", False
    ):
        return "base has another layout of its weight"
    return Packed(linear.weight, state, dtype)


def dequantised(data: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """data: packed numbers with their state, or a weight that is not quantised (or None), whose state is None."""
    if state is None:
        return data
    functional: Any = importlib.import_module("bitsandbytes.functional")
    return functional.dequantize_4bit(data.detach(), state).to(dtype)
