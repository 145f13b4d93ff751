"""The declaration in an op's benchmark file: inputs, shapes, floor and providers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = tuple[int, ...]


class Absent(Exception):
    """A provider cannot be measured; the message gives the reason."""


@dataclass(frozen=True)
class Relative:
    """A limit relative to the same run: factor times the fastest of these providers."""

    factor: float
    providers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.factor:g} × {' or '.join(self.providers)}"


Bar = float | Relative

NO_SLOWER_THAN_EAGER = dict.fromkeys(("forward", "full"), Relative(1.0, ("torch", "hf")))


@dataclass(frozen=True)
class Anchor:
    """A case with limits for ours, or for a setting of it, by pass: µs and MiB above the inputs."""

    shape: Shape
    dtype: str
    must: Mapping[str, Bar] = field(default_factory=dict)
    must_mib: Mapping[str, Bar] = field(default_factory=dict)
    device: str = "cuda"
    provider: str = "ours"


@dataclass(frozen=True)
class Host:
    """A tensor so small that the host is slower than the device. The host cost of a call is measured on it."""

    shape: Shape
    dtype: str
    must: Mapping[str, Bar]


@dataclass(frozen=True)
class Op:
    dims: tuple[str, ...]  # names of a shape's dimensions
    inputs: Callable[..., dict[str, torch.Tensor]]  # (make, *shape) -> arguments in call order
    # Eager code: the provider "hf", the code that torch.compile compiles, and, with fp64 inputs, the reference.
    formula: Callable[..., Any]
    traffic: Callable[..., tuple[int, int]]  # (element size, *shape) -> fewest bytes moved forward, backward
    shapes: Mapping[str, Sequence[Shape]]  # suite (and "quick-cpu") -> shapes
    # Name -> function that returns the callable. "ours" is the operator of the file's name, if none is given.
    providers: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    anchors: Sequence[Anchor] = ()
    host: Mapping[str, Host] = field(default_factory=dict)  # by device
    constants: frozenset[str] = frozenset()  # inputs that take no gradient
    # Inputs that a model drops after the call. The benchmark then holds no reference to them either.
    transient: frozenset[str] = frozenset()
    flops: Callable[..., tuple[int, int]] | None = None  # (*shape) -> matrix-unit operations forward, backward
    floor: str | None = None  # a provider that does only the unavoidable work: its time is the floor if it ran
    unchecked: frozenset[str] = frozenset()  # providers that do only a part of the work, like that of the floor
    gradients: Callable[..., int] | None = (
        None  # (element size, *shape) -> bytes of the gradients, the smallest possible peak
    )
    passes: tuple[str, ...] = ("forward", "backward", "full")
    # (*shape) -> the smaller shape on which results are checked and their errors reported, with random upstream
    # gradients. The case itself is timed with upstream gradients of 1, as a loss gets them.
    checked: Callable[..., Shape] | None = None
    # (*shape) -> the number of values whose mean is an output. Eager code rounds each to the dtype of the inputs.
    averaged: Callable[..., int] | None = None
    must_error: Mapping[str, Bar] = field(
        default_factory=dict
    )  # limits for every setting of ours, by gradient ("d input")
    asked: Mapping[str, Sequence[str]] = field(default_factory=dict)  # suite -> providers, if not all
    dtypes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # suite -> dtypes, if not those of the suite
    # Providers timed from import to the first finished step, and the limit for ours in seconds, by device.
    cold_start: tuple[str, ...] = ()
    cold_start_must: Mapping[str, float] = field(default_factory=dict)
    # Kernel -> the share of the copy bandwidth at which it must move the op's bytes; `tune --as-is` checks it.
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
