"""Sharding rules of operators, for DTensor.

A rule lists layouts: the placements of an operator's results and of its arguments over one mesh dimension, for which the
operator may run on each device's own part. DTensor applies them to every mesh dimension. It would redistribute any other
layout silently, so a rule refuses what it does not list, except for moves that are free or that it names.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

R = Replicate()
SUM = Partial("sum")

# Results' placements (None: no such result), and arguments' by name.
Layout = tuple[list["Placement | None"], dict[str, Placement]]


def row_placements(x: Any) -> Iterator[Placement]:
    """For operators that work along the last dimension."""
    yield R
    yield from (Shard(d) for d in range(x.ndim - 1))


def any_placements(x: Any) -> Iterator[Placement]:
    """For operators that work on each element alone."""
    yield R
    yield from (Shard(d) for d in range(x.ndim))


def column_placements(x: Any) -> Iterator[tuple[Placement, Placement]]:
    """For operators that work on each element alone, with parameters: of x and of one number per column."""
    for part in any_placements(x):
        yield part, Shard(0) if part == Shard(x.ndim - 1) else R


def summed(placement: Placement) -> Placement:
    """Of a sum over all rows, when the rows have this placement."""
    return SUM if isinstance(placement, Shard) else R


def none_beside_dtensors(op: str, **tensors: Any) -> None:
    """register_sharding has no layouts for tensors that are passed by keyword."""
    for name, given in tensors.items():
        if given is not None:
            raise ValueError(f"{op}: {name} must be None beside DTensors (got a DTensor)")


def is_strided(placement: Any) -> bool:
    """Whether each device has a part of each of several parts of a dimension. PyTorch has no public name for it."""
    return type(placement).__name__ == "_StridedShard"


def text_of(placement: Any) -> str:
    if is_strided(placement):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return "Partial()" if placement.is_partial() else "Replicate()"


class Rule:
    def __init__(
        self, op: str, layouts: Callable[..., Iterable[Layout]], reduced: tuple[str, ...], gathered: tuple[str, ...]
    ) -> None:
        self.overload = getattr(torch.ops.liger, op).default
        self.layouts, self.reduced, self.gathered = layouts, reduced, gathered
        self.defaults = {a.name: a.default_value for a in self.overload._schema.arguments}
        self.caller = op.lstrip("_").rstrip("_").removesuffix("_fwd").removesuffix("_bwd")

    def may_move(self, name: str, spec: Any, given: Placement, wanted: Placement) -> bool:
        if given == wanted or given == R:  # each device takes its part of what it has
            return True
        if given.is_partial():
            return name in self.reduced
        return name in self.gathered and wanted == R and given == Shard(spec.ndim - 1)

    def __call__(self, *args: Any, **kwargs: Any) -> list[tuple[list, list]]:
        bound = self.defaults | dict(zip(self.defaults, args)) | kwargs
        layouts = list(self.layouts(**bound))
        tensors = {name: value for name, value in bound.items() if hasattr(value, "placements")}
        mesh = next(iter(tensors.values())).mesh
        for i in range(mesh.ndim):
            self.check_dimension(i, mesh, tensors, layouts)
        names = [*self.defaults][: len(args)]
        return [(results, [inputs[name] if name in tensors else None for name in names]) for results, inputs in layouts]

    def check_dimension(self, i: int, mesh: Any, tensors: dict[str, Any], layouts: list[Layout]) -> None:
        fitting = layouts
        for name, spec in tensors.items():
            given = spec.placements[i]
            kept = [layout for layout in fitting if self.may_move(name, spec, given, layout[1][name])]
            if not kept:
                over = repr(mesh.mesh_dim_names[i]) if mesh.mesh_dim_names else str(i)
                allowed = list(dict.fromkeys(text_of(layout[1][name]) for layout in fitting))
                raise ValueError(
                    f"{self.caller}: {name} must be {' or '.join(allowed)} over mesh dimension {over} "
                    f"(got {text_of(given)})"
                )
            fitting = kept


RULES: dict[str, Rule] = {}


def sharding(
    *ops: str, reduced: tuple[str, ...] = (), gathered: tuple[str, ...] = ()
) -> Callable[[Callable[..., Iterable[Layout]]], Callable[..., Iterable[Layout]]]:
    """Declares the layouts of operators.

    reduced: arguments that may be partial sums, which a reduction then completes. gathered: arguments that may be sharded
    along their last dimension, and are then gathered.
    """

    def declare(layouts: Callable[..., Iterable[Layout]]) -> Callable[..., Iterable[Layout]]:
        for op in ops:
            RULES[op] = Rule(op, layouts, reduced, gathered)
            register_sharding(RULES[op].overload)(RULES[op])
        return layouts

    return declare


# A Library unregisters its functions when it is deleted.
_library = torch.library.Library("liger", "FRAGMENT")


def on_dtensors(op: str) -> Callable[[Callable], Callable]:
    """Registers a function as an operator's implementation for DTensors: where parts need more than the same call."""

    def declare(function: Callable) -> Callable:
        defaults = {a.name: a.default_value for a in getattr(torch.ops.liger, op).default._schema.arguments}

        @torch.library.register_torch_dispatch(f"liger::{op}", DTensor, lib=_library)
        def call(cls: Any, func: Any, types: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
            return function(**defaults | dict(zip(defaults, args)) | (kwargs or {}))

        return function

    return declare


def register() -> None:
    """One file of `rules` for each operator."""
    from . import rules

    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")
