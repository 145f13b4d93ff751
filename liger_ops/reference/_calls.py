"""Calls of an operator, made from its declaration: shapes and values of the tensors that its documentation describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._documentation import Described, documentation
from ._operator import Operator


class Shapes:
    """The shapes of one call. Every dimension letter has one size in it."""

    def __init__(
        self, size_of: Callable[[str], int], leading: Callable[[], list[int]], choose: Callable[[Sequence[str]], str]
    ) -> None:
        """size_of: a letter. leading: the sizes for "...". choose: one of the alternatives that the text gives."""
        self.size_of, self.leading, self.choose = size_of, leading, choose
        self.sizes: dict[str, int] = {}
        self.dimensions: list[int] | None = None  # of "..."
        self.known: dict[str, list[int]] = {}

    def size(self, letter: str) -> int:
        if letter not in self.sizes:
            self.sizes[letter] = self.size_of(letter)
        return self.sizes[letter]

    def dimension(self, written: str) -> list[int]:
        if written == "...":
            self.dimensions = self.leading() if self.dimensions is None else self.dimensions
            return self.dimensions
        if " or " in written:
            written = self.choose(written.split(" or "))
        if written.isdigit():
            return [int(written)]
        parts = re.fullmatch(r"(?:(\d+) )?([A-Z][a-z]?|[a-z])(?: / (\d+))?", written)
        assert parts, written
        factor, letter, divisor = parts.groups()
        return [int(factor or 1) * self.size(letter) // int(divisor or 1)]

    def shape(self, written: str) -> list[int]:
        """Tensors that are described together get the same shape."""
        if written not in self.known:
            chosen = self.choose(re.findall(r"\(([^)]*)\)", written))
            self.known[written] = [n for part in chosen.rstrip(",").split(", ") for n in self.dimension(part)]
        return self.known[written]


def described_tensors(operator: Operator) -> dict[str, Described]:
    """The tensor arguments."""
    return documentation(operator.alias_of or operator).tensors


def numbers(
    operator: Operator, name: str, described: Described, shape: Sequence[int], generator: torch.Generator
) -> Tensor:
    """Random values in fp64, or complex, for an argument that holds no indices."""
    t = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
    # Predictions must not depend on rounding: sums of these values are exact in every dtype.
    t = (2 * t).round().clamp(-4, 4) / 4 if "predicted_tokens" in getattr(operator.result, "_fields", ()) else t
    # Class and token weights are never negative.
    t = t.abs() if name.endswith("weight") and name in operator.constants else t
    return torch.view_as_complex(t) if described.is_of("complex") else t[..., 0]
