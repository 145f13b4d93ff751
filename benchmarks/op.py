"""What the benchmark file of an op declares: shapes, floor, inputs and who is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = tuple[int, ...]


class Absent(Exception):
    """A provider that has nothing to measure here; the message says why."""


@dataclass(frozen=True)
class Relative:
    """A bar taken from the same run: factor times the fastest of these providers."""

    factor: float
    providers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.factor:g} × {' or '.join(self.providers)}"


Bar = float | Relative

NO_SLOWER_THAN_EAGER = dict.fromkeys(("forward", "full"), Relative(1.0, ("torch", "hf")))


@dataclass(frozen=True)
class Anchor:
    """A case that ours (or a setting of it) must run no slower (µs) and no bigger (MiB above the inputs) than stated,
    by pass."""

    shape: Shape
    dtype: str
    must: Mapping[str, Bar] = field(default_factory=dict)
    must_mib: Mapping[str, Bar] = field(default_factory=dict)
    device: str = "cuda"
    provider: str = "ours"


@dataclass(frozen=True)
class Host:
    """The tensor, too small to keep the device busy, on which the cost of a call itself is measured."""

    shape: Shape
    dtype: str
    must: Mapping[str, Bar]


@dataclass(frozen=True)
class Op:
    dims: tuple[str, ...]  # names of a shape's numbers
    inputs: Callable[..., dict[str, torch.Tensor]]  # (make, *shape) -> arguments in call order
    # Plain eager code: the provider "hf", the oracle when fed fp64, and what torch.compile compiles.
    formula: Callable[..., Any]
    traffic: Callable[..., tuple[int, int]]  # (element size, *shape) -> fewest bytes moved forward, backward
    providers: Mapping[str, Callable[[], Callable[..., Any]]]  # name -> loader of the callable
    shapes: Mapping[str, Sequence[Shape]]  # suite (and "quick-cpu") -> shapes
    anchors: Sequence[Anchor] = ()
    host: Mapping[str, Host] = field(default_factory=dict)  # by device
    constants: frozenset[str] = frozenset()  # inputs that take no gradient
    # Inputs that a model would drop after the call; they are passed so that no one else can see them.
    transient: frozenset[str] = frozenset()
    flops: Callable[..., tuple[int, int]] | None = None  # (*shape) -> matrix-unit operations forward, backward
    floor: str | None = None  # a provider that does but what nobody can leave out: its time is the floor, where it ran
    unchecked: frozenset[str] = frozenset()  # providers that do only a part of the work, like the floor's
    gradients: Callable[..., int] | None = None  # (element size, *shape) -> bytes of the gradients, the least peak
    passes: tuple[str, ...] = ("forward", "backward", "full")
    # (*shape) -> the smaller shape on which results are checked and their errors reported, with random upstream
    # gradients. The case itself is then timed with upstream gradients of 1, which is what arrives for a loss.
    checked: Callable[..., Shape] | None = None
    # (*shape) -> how many values, rounded to the inputs' dtype on the way, an output is the mean of.
    averaged: Callable[..., int] | None = None
    must_error: Mapping[str, Bar] = field(default_factory=dict)  # of every setting of ours, by gradient ("d input")
    asked: Mapping[str, Sequence[str]] = field(default_factory=dict)  # suite -> providers, where not all are
    dtypes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # suite -> dtypes, where not the suite's
    # Providers timed from import to first finished step, and the bar for ours in seconds by device.
    cold_start: tuple[str, ...] = ()
    cold_start_must: Mapping[str, float] = field(default_factory=dict)
    # Kernels that alone must move the op's bytes at this share of the copy ceiling: `tune --as-is` measures and judges.
    kernels_must: Mapping[str, float] = field(default_factory=dict)


class Make:
    """Random inputs of one case."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=self.device, generator=self.generator)
