"""As for :func:`torch.nn.functional.embedding`, which computes it: its rules cover a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from .._sharding import on_dtensors


@on_dtensors("embedding")
def forward(input: Any, weight: Any, padding_idx: int | None) -> Any:
    return torch.ops.aten.embedding(weight, input, -1 if padding_idx is None else padding_idx)


@on_dtensors("_embedding_bwd")
def backward(dout: Any, input: Any, classes: int, padding_idx: int) -> Any:
    return torch.ops.aten.embedding_dense_backward(dout, input, classes, padding_idx, False)
