"""Linear functions with a gradient of their own: autograd's would be slower, or lack what other ranks computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = Tensor | tuple[Tensor, ...]


class LinearMap(torch.autograd.Function):
    """``LinearMap.apply(function, transposed, *tensors)`` is ``function(*tensors)``. transposed makes the gradients of
    the tensors of those of the results. Neither keeps a tensor."""

    @staticmethod
    def forward(function: Callable[..., Tensors], transposed: Callable[..., Tensors], *tensors: Tensor) -> Tensors:
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.transposed = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = ctx.transposed(*grads)
        return None, None, *(found if isinstance(found, tuple) else (found,))
