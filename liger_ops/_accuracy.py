"""Bounds for rounding errors that hold on every CPU and GPU. Tests and benchmarks use them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor


class Roundings:
    """Bounds for the rounding errors of a formula's results. They depend neither on the processor nor on threads, and are
    computed when they are asked for, because most comparisons need none.

    The operations that a value passes through change it as a few roundings of the inputs would, so the first part is how
    far the results move with random roundings of all inputs: the most of several draws, because in one of them the
    roundings of a result may cancel. Sums in another order are the second part: their errors are independent and grow
    with the square root of the number of terms."""

    OPERATIONS = 4
    DRAWS = 8

    def __init__(
        self,
        oracle: Sequence[Tensor],
        results: Callable[[int], Sequence[Tensor]],
        inputs: Iterable[Tensor | None],
        precision: torch.dtype,
        smooth: bool = False,
    ) -> None:
        """oracle, results: in fp64, of the inputs and of the rounded() inputs of a draw. smooth: nothing is chosen by its
        value."""
        self.oracle, self.results, self.eps = oracle, cache(results), torch.finfo(precision).eps
        self.present = [t for t in inputs if t is not None]
        # If a rounding changes which of two equal values is the largest, the movement says nothing about errors.
        self.most = math.inf if smooth else self.eps ** (2 / 3)

    def bound(self, i: int, distance: Callable[[Tensor, Tensor], float]) -> float:
        """For the distance of result i from the oracle."""
        moved = max(distance(self.results(draw)[i], self.oracle[i]) for draw in range(self.DRAWS))
        return min(self.OPERATIONS * moved + self.sums(i), self.most)

    def sums(self, i: int) -> float:
        """Of the most terms that a result can add up: a row, or all elements that meet in one of the result's."""
        row = max((t.shape[-1] for t in self.present if t.dim()), default=1)
        elements = max((t.numel() for t in self.present), default=1)
        terms = max(row, elements // max(self.oracle[i].numel(), 1))
        return terms**0.5 * torch.finfo(compute_dtype(self.present)).eps


def rounded(tensors: Sequence[Tensor | None], precision: torch.dtype, draw: int = 0) -> list[Tensor | None]:
    """In fp64, with a random error in each element of at most one unit in the last place of `precision`. The errors do
    not depend on other random numbers of the process."""
    generator = torch.Generator().manual_seed(draw)

    def with_errors(t: Tensor | None) -> Tensor | None:
        if t is None or not t.is_floating_point():
            return t
        error = torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.device) * 2 - 1
        return (t.detach().double() * (1 + torch.finfo(precision).eps * error)).requires_grad_(t.requires_grad)

    return [with_errors(t) for t in tensors]


def compute_dtype(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """The precision of sums: fp32, or fp64 if an input is fp64."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
