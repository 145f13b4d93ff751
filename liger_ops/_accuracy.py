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


@torch.no_grad()
def distance(a: Tensor, oracle: Tensor, scale: float = 0.0) -> float:
    """Largest error, relative to the oracle's largest magnitude or to `scale` if that is larger."""
    if a.numel() == 0:
        return 0.0
    largest = max(float(oracle.abs().max()), scale, 1e-30)
    return float((a.double() - oracle.double()).abs().max()) / largest


def noise_of(op: str, device: str) -> float:
    """What a GPU's units may add to the error of an operator, relative to its results."""
    # Tensor cores add up products of 8-bit numbers with 13 bits, and cut off the rest: 16 times in 512 products.
    return 2.0**-9 if op.startswith("fp8_") and device == "cuda" else 0.0


# How often eager's error ours may be, for another order of sums.
OF_EAGER = 1.5


def judged(
    ours: Tensor,
    eager: Tensor,
    oracle: Tensor,
    scale: float = 0.0,
    noise: float = 0.0,
    bounds: tuple[Roundings, int] | None = None,
) -> tuple[float, float]:
    """Our error against fp64, and the error allowed: OF_EAGER times eager's error in the same dtype, plus one rounding of the
    result. noise: additional allowance for random variation.

    Eager's error is that of one CPU and one draw, and may be small by chance. So our error may also be as large as the
    error of any code that computes the formula in this precision: bounds, and the number of this result in them."""
    error = distance(ours, oracle, scale)
    allowed = OF_EAGER * distance(eager, oracle, scale) + torch.finfo(ours.dtype).eps + noise
    if error > allowed and bounds is not None:
        allowed += bounds[0].bound(bounds[1], lambda a, b: distance(a, b, scale))
    return error, allowed


def like(t: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    """A leaf with the same values and strides. Floating-point tensors are cast to `dtype`."""
    if t is None or not t.is_floating_point():
        return t
    return t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad)


def gradients(function: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, followed by the gradients of all inputs that require one. 8-bit floats are returned as their bits."""
    out = function(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    outs = tuple(o.view(torch.uint8) if o.dtype == torch.float8_e4m3fn else o for o in outs)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    pairs = [(o, g.to(o.dtype)) for o, g in zip(outs, grads_out) if o.requires_grad]
    grads = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs]) if wanted else []
    return [*outs, *grads]


def roundings(
    function: Callable, inputs: Sequence[Tensor | None], grads_out: Sequence[Tensor], oracle: Sequence[Tensor],
    precision: torch.dtype | None = None,
) -> Roundings:  # fmt: skip
    """Of gradients(function, inputs, grads_out), whose results in fp64 are `oracle`. precision: that of intermediate
    results, if it is not that of sums."""
    precision = precision or compute_dtype(inputs)

    def of_rounded(draw: int) -> list[Tensor]:
        changed = rounded([*inputs, *grads_out], precision, draw)
        slopes = [t for t in changed[len(inputs) :] if t is not None]
        return gradients(function, changed[: len(inputs)], slopes)

    return Roundings(oracle, of_rounded, inputs, precision)
