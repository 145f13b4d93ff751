"""What the backward of every operator shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple]


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, count: int, *gradients_and_sources: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.op = op
        return gradients_and_sources[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(f"{ctx.op}: double backward is not supported")


def once_differentiable(op: str) -> Callable[[Backward], Backward]:
    """For backward(ctx, saved tensors, *grads). torch's own decorator refuses a second derivative only where what
    arrives is being differentiated; that of a loss is a constant, while its gradient depends on what is saved."""

    def decorate(backward: Backward) -> Backward:
        def once(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            # Before autograd steps aside: a hook may run forward code, as checkpointing does.
            saved = ctx.saved_tensors
            with torch.no_grad():
                gradients = backward(ctx, saved, *grads)
            if not torch.is_grad_enabled():
                return gradients
            return _Final.apply(op, len(gradients), *gradients, *grads, *saved)

        return once

    return decorate
