"""Losses whose classes are split over the ranks of a process group: their declarations, and collectives with gradients."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ._operator import Operator, demand, derived

R = TypeVar("R")

# The operators that torch.compile traces.
_collectives = torch.ops._c10d_functional


def _wait(t: Tensor) -> Tensor:
    return _collectives.wait_tensor(t)


def group_of(op: str, name: str) -> Any:
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError):
        raise RuntimeError(f"{op}: group must be the name of a process group (got '{name}')") from None


def sizes_of(op: str, group: Any, classes: int, class_sizes: Sequence[int] | None) -> list[int]:
    """The number of classes of each rank."""
    demand(classes > 0, op, "classes", "be positive", classes)
    ranks = group.size()
    if class_sizes is None:
        each = -(-classes // ranks)
        return [max(0, min(each, classes - rank * each)) for rank in range(ranks)]
    adds_up = sum(class_sizes) == classes and min(class_sizes) >= 0
    demand(adds_up, op, "class_sizes", f"be the classes of each rank, {classes} in all", list(class_sizes))
    numbers = f"{len(class_sizes)} numbers"
    demand(len(class_sizes) == ranks, op, "class_sizes", f"have one number for each of the {ranks} ranks", numbers)
    return list(class_sizes)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(part: Tensor, dim: int, group: Any, sizes: list[int]) -> Tensor:
        shape = list(part.shape)
        shape[dim] = max(sizes)
        sent = part.new_zeros(shape)
        sent.narrow(dim, 0, sizes[group.rank()]).copy_(part)
        received = _wait(_collectives.all_gather_into_tensor(sent.unsqueeze(0), len(sizes), group.group_name)).unbind(0)
        return torch.cat([t.narrow(dim, 0, size) for t, size in zip(received, sizes)], dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.dim, group, sizes = inputs
        ctx.first, ctx.size = sum(sizes[: group.rank()]), sizes[group.rank()]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].narrow(ctx.dim, ctx.first, ctx.size), None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _wait(_collectives.all_reduce(grads[0].contiguous(), "sum", ctx.group.group_name)), None


def joined(part: Tensor, dim: int, group: Any, sizes: list[int]) -> Tensor:
    """The parts of all ranks, from which every rank computes the same: the gradient of a part is its slice."""
    return _Join.apply(part, dim, group, sizes)


def shared(x: Tensor, group: Any) -> Tensor:
    """x, from which every rank computes a part: its gradient is the sum over ranks."""
    return _Share.apply(x, group)


@dataclass
class Split:
    """The part of the classes, and with `sequence_dim` of the positions, that this rank of a process group has."""

    op: str
    group: str
    classes: int  # of all ranks
    _: KW_ONLY
    class_sizes: Sequence[int] | None = None  # of each rank
    sequence_dim: int | None = None

    def __post_init__(self) -> None:
        self.ranks = group_of(self.op, self.group)
        self.sizes = sizes_of(self.op, self.ranks, self.classes, self.class_sizes)

    def check(self, argument: str, classes: int) -> None:
        rank, ranks = self.ranks.rank(), self.ranks.size()
        rule = f"have {self.sizes[rank]} classes, those of rank {rank} of {ranks}"
        demand(classes == self.sizes[rank], self.op, argument, rule, classes)

    def all_classes(self, logits: Tensor) -> Tensor:
        return joined(logits, logits.dim() - 1, self.ranks, self.sizes)

    def all_positions(self, input: Tensor, prefix: str, positions: Sequence[int] | None) -> Tensor:
        """prefix: of the argument's name. positions: the dimensions of the positions of all ranks, if known."""
        if self.sequence_dim is not None:
            dim, ranks = self.sequence_dim % input.dim(), self.ranks.size()
            rule = f"be a dimension of {prefix}input other than the last"
            demand(dim < input.dim() - 1, self.op, "sequence_dim", rule, self.sequence_dim)
            have = input.shape[dim]
            if positions is not None:
                rule = f"have {positions[dim]} / {ranks} positions along sequence_dim, the same on every rank"
                demand(have * ranks == positions[dim], self.op, f"{prefix}input", rule, have)
            input = joined(input, dim, self.ranks, [have] * ranks)
        return shared(input, self.ranks)


# Examples run in a process group of one rank.
BEFORE = (
    ">>> import torch.distributed as dist",
    '>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)',
)
AFTER = ">>> dist.destroy_process_group()"


def vocab_parallel(base: Operator[..., Any], sequence: bool = True) -> Callable[[Callable[..., R]], Operator[..., R]]:
    """Declares the form of `base` for split classes, from a formula that takes its arguments, `op` and `split` by name.
    sequence: whether positions may be split too."""
    added = [p for name, p in inspect.signature(Split).parameters.items() if name != "op"][: 4 if sequence else 3]
    names, kinds = [p.name for p in added], typing.get_type_hints(Split)

    def declare(formula: Callable[..., R]) -> Operator[..., R]:
        @functools.wraps(formula)
        def of_split(op: str, **given: Any) -> R:
            return formula(op=op, split=Split(op, **{name: given.pop(name) for name in names}), **given)

        text, _, example = (formula.__doc__ or "").rstrip().partition(">>> ")
        margin = text.rpartition("\n")[2]
        of_split.__doc__ = text + f"\n{margin}".join([*BEFORE, f">>> {example}", AFTER, ""])
        given = [*base.__signature__.parameters.values()]
        required = [p for p in given if p.default is p.empty]
        parameters = [*required, *added[:2], *given[len(required) :], *added[2:]]
        types = {**base.types, **{name: kinds[name] for name in names}}
        return derived(base, base.__signature__.replace(parameters=parameters), types, of_split)

    return declare
