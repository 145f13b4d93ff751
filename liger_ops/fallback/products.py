"""_mm."""

from __future__ import annotations

import torch
from torch import Tensor


def mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


def register() -> None:
    op = torch.library.custom_op("liger::_mm", mm, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
    op.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
