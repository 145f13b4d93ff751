"""_projections_grad."""

from __future__ import annotations

import torch
from torch import Tensor


def projections_grad(grads: list[Tensor], weights: list[Tensor]) -> Tensor:
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:]):
        total.addmm_(grad, weight)
    return total


def register() -> None:
    schema = "(Tensor[] grads, Tensor[] weights) -> Tensor"
    op = torch.library.custom_op("liger::_projections_grad", projections_grad, mutates_args=(), schema=schema)
    op.register_fake(lambda grads, weights: grads[0].new_empty(grads[0].shape[0], weights[0].shape[1]))
