"""Losses of hidden states and a head: logits exist for a chunk of tokens at a time, and backward computes them again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ._operator import capped, demand, demand_positive, widened
from ._split import Split

# Eager code stores each logit in its own dtype, and in fp32 before and after the softmax.
BYTES_PER_LOGIT = 16


def chunk_size(classes: int, memory_budget: int | None) -> int:
    """Number of tokens whose logits may exist at the same time."""
    return max(1, (1 << 30 if memory_budget is None else memory_budget) // (BYTES_PER_LOGIT * max(1, classes)))


@dataclass
class Head:
    """Logits ``softcap(scale * (input @ weight.T + bias))`` of input (..., n).

    prefix: of its arguments' names. wide: the logits are not rounded to the dtype of the input.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    prefix: str = ""
    wide: bool = False

    def check(self, op: str) -> None:
        demand(math.isfinite(self.scale), op, f"{self.prefix}logits_scale", "be finite", self.scale)
        demand_positive(op, f"{self.prefix}softcap", self.softcap)

    def over(self, split: Split, positions: Sequence[int] | None) -> Head:
        split.check(f"{self.prefix}weight", self.weight.shape[0])
        return replace(self, input=split.all_positions(self.input, self.prefix, positions))

    def logits(self, x: Tensor, split: Split | None) -> Tensor:
        """(rows, V) of x: (rows, n), as they enter the softmax."""
        weight, bias = self.weight, self.bias
        if self.wide:
            x, weight, bias = widened(x), widened(weight), None if bias is None else widened(bias)
        part = self.scale * functional.linear(x, weight, bias)
        return capped(part if split is None else split.all_classes(part), self.softcap)


class Linear:
    """The tokens of one call, and their logits through one head or two.

    split: of the classes of all heads. positions: the dimensions of all ranks' tokens, if known.
    """

    def __init__(
        self,
        op: str,
        heads: list[Head],
        memory_budget: int | None,
        split: Split | None,
        positions: Sequence[int] | None,
    ) -> None:
        if split is not None:
            heads = [head.over(split, positions) for head in heads]
        for head in heads:
            head.check(op)
        enough = memory_budget is None or memory_budget > 0
        demand(enough, op, "memory_budget", "be a positive number of bytes", memory_budget)
        self.heads, self.split = heads, split
        self.inputs = [head.input for head in heads]
        self.tokens = self.inputs[0].shape[:-1]
        classes = sum(head.weight.shape[0] for head in heads) if split is None else len(heads) * split.classes
        self.chunk = chunk_size(classes, memory_budget)

    def map(self, loss: Callable[..., tuple[Tensor, ...]], *facts: Tensor | None) -> tuple[Tensor, ...]:
        """What `loss` computes from the logits of each head and the facts of each token, for all tokens.

        facts: (tokens, ...), as are the results.
        """

        def of_chunk(*parts: Any) -> tuple[Tensor, ...]:
            logits = [head.logits(x, self.split) for head, x in zip(self.heads, parts)]
            return loss(*logits, *parts[len(logits) :])

        rows = [*(torch.atleast_2d(x).flatten(0, -2) for x in self.inputs), *facts]
        if self.tokens.numel() <= self.chunk:
            return of_chunk(*rows)
        # Function transforms lack the saved-tensor hooks with which backward computes a chunk again.
        transformed = torch._C._are_functorch_transforms_active()
        found = [
            of_chunk(*chunk)
            if transformed
            else checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*(repeat(None) if t is None else t.split(self.chunk) for t in rows))
        ]
        return tuple(map(torch.cat, zip(*found)))
