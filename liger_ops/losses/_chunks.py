"""Losses that need logits themselves: chunk by chunk, recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ..reference._linear import chunk_size


def widened(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def summed(parameter: Any) -> Any:
    """In fp32 if it is trained: the chunks' gradients of a half-precision parameter would be added up in its dtype."""
    return widened(parameter) if parameter is not None and parameter.requires_grad else parameter


def logits_of(rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: float = 1.0) -> Tensor:
    weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
    return widened(linear(rows, weight, bias)) / temperature


def in_chunks(
    function: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], classes: int, memory_budget: int | None
) -> tuple[Tensor, ...]:
    """function of chunks of `rows`, all (N, ...), concatenated. The logits of one chunk exist at a time."""
    parts = zip(*(t.split(chunk_size(classes, memory_budget)) for t in rows))
    found = [checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return tuple(map(torch.cat, zip(*found)))
