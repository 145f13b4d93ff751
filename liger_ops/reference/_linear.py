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
    """Logits ``softcap(scale * (input @ weight.T + low_rank_input @ low_rank_weight.T + bias))`` of input (..., n).

    prefix: of its arguments' names. wide: the logits are not rounded to the dtype of the input.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    prefix: str = ""
    wide: bool = False
    low_rank_input: Tensor | None = None
    low_rank_weight: Tensor | None = None

    def check(self, op: str) -> None:
        demand(math.isfinite(self.scale), op, f"{self.prefix}logits_scale", "be finite", self.scale)
        demand_positive(op, f"{self.prefix}softcap", self.softcap)

    def check_low_rank(self, op: str, sequence_dim: int | None) -> None:
        t, b, names = (
            self.low_rank_input,
            self.low_rank_weight,
            [f"{self.prefix}low_rank_{n}" for n in ("input", "weight")],
        )
        got = "None" if b is None else "a tensor"
        demand((t is None) == (b is None), op, names[1], f"be given if and only if {names[0]} is", got)
        if t is None or b is None:
            return
        rule = f"have the shape of {self.prefix}input, {list(self.input.shape)}, except for the last dimension"
        fits = t.dim() > 0 and t.shape[:-1] == self.input.shape[:-1]
        demand(fits, op, names[0], rule, list(t.shape))
        shape = [self.weight.shape[0], t.shape[-1]]
        rule = f"have shape {shape}, the classes and the last dimension of {names[0]}"
        demand(list(b.shape) == shape, op, names[1], rule, list(b.shape))
        demand(sequence_dim is None, op, names[0], "be None with sequence_dim", "both")

    def over(self, split: Split, positions: Sequence[int] | None) -> Head:
        split.check(f"{self.prefix}weight", self.weight.shape[0])
        t = self.low_rank_input
        return replace(
            self,
            input=split.all_positions(self.input, self.prefix, positions),
            low_rank_input=None if t is None else split.all_positions(t, self.prefix, positions),
        )

    def logits(self, x: Tensor, t: Tensor | None, split: Split | None) -> Tensor:
        """(rows, V) of x: (rows, n), as they enter the softmax. t: the rows of low_rank_input."""
        weight, bias = self.weight, self.bias
        if self.wide:
            x, weight, bias = widened(x), widened(weight), None if bias is None else widened(bias)
        part = functional.linear(x, weight, bias)
        if t is not None and self.low_rank_weight is not None:
            part = (part + functional.linear(widened(t), widened(self.low_rank_weight))).to(part.dtype)
        part = self.scale * part
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
        for head in heads:
            head.check_low_rank(op, None if split is None else split.sequence_dim)
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

        count = len(self.heads)

        def of_chunk(*parts: Any) -> tuple[Tensor, ...]:
            logits = [head.logits(x, t, self.split) for head, x, t in zip(self.heads, parts, parts[count:])]
            return loss(*logits, *parts[2 * count :])

        of_heads = [*self.inputs, *(head.low_rank_input for head in self.heads)]
        rows = [*(None if x is None else torch.atleast_2d(x).flatten(0, -2) for x in of_heads), *facts]
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
