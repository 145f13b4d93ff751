"""Losses whose classes may be split over the ranks of a process group: what their declarations share, and collectives with
gradients."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ._linear_map import LinearMap
from ._operator import Operator, demand, derived

P = ParamSpec("P")
R = TypeVar("R")
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD

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


def joined(part: Tensor, dim: int, group: Any, sizes: list[int]) -> Tensor:
    """The parts of all ranks, from which every rank computes the same: the gradient of a part is its slice."""

    def gathered(part: Tensor) -> Tensor:
        shape = list(part.shape)
        shape[dim] = max(sizes)
        sent = part.new_zeros(shape)
        sent.narrow(dim, 0, sizes[group.rank()]).copy_(part)
        received = _wait(_collectives.all_gather_into_tensor(sent.unsqueeze(0), len(sizes), group.group_name)).unbind(0)
        return torch.cat([t.narrow(dim, 0, size) for t, size in zip(received, sizes)], dim)

    def sliced(grad: Tensor) -> Tensor:
        return grad.narrow(dim, sum(sizes[: group.rank()]), sizes[group.rank()])

    return LinearMap.apply(gathered, sliced, part)


def shared(x: Tensor, group: Any) -> Tensor:
    """x, from which every rank computes a part: its gradient is the sum over ranks."""

    def summed(grad: Tensor) -> Tensor:
        return _wait(_collectives.all_reduce(grad.contiguous(), "sum", group.group_name))

    return LinearMap.apply(lambda x: x.view_as(x), summed, x)


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


def split_of(
    op: str, group: str, classes: int, class_sizes: Sequence[int] | None, sequence_dim: int | None = None
) -> Split | None:
    """None if the classes are not split."""
    if group or classes:
        return Split(op, group, classes, class_sizes=class_sizes, sequence_dim=sequence_dim)
    demand(class_sizes is None, op, "class_sizes", "be None without a group", class_sizes)
    demand(sequence_dim is None, op, "sequence_dim", "be None without a group", sequence_dim)
    return None


CLASSES = """With `group`, the name of a process group (``group.group_name``), the classes are split over its ranks: {these} are
of this rank's classes, everything else is about all `classes`. Rank r holds the classes that ``torch.chunk`` gives to part r,
or ``class_sizes[r]`` of them. Every rank gets the same results{more}."""
SEQUENCE = """, and the whole gradient of {inputs}. With `sequence_dim`, {inputs} and its gradient are this rank's equal part
along that dimension"""


def splittable(of_classes: str, inputs: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Documents the arguments `group`, `classes`, `class_sizes` and `sequence_dim` of a formula.

    of_classes: its tensors with one row or column per class. inputs: those that `sequence_dim` splits.
    """

    def document(formula: Callable[P, R]) -> Callable[P, R]:
        text, _, example = (formula.__doc__ or "").rstrip().partition(">>> ")
        margin = text.rpartition("\n")[2]
        added = CLASSES.format(these=of_classes, more=SEQUENCE.format(inputs=inputs) if inputs else "")
        lines = textwrap.wrap(" ".join(added.split()), 120 - len(margin), break_on_hyphens=False)
        formula.__doc__ = f"{text.rstrip()}\n\n" + "".join(f"{margin}{line}\n" for line in lines)
        formula.__doc__ += f"\n{margin}>>> {example}\n{margin}"
        return formula

    return document


def vocab_parallel(base: Operator[..., R]) -> Operator[..., R]:
    """Declares vocab_parallel_<base>: an alias, with `group` and `classes` after the required arguments."""

    def formula(op: str, **given: Any) -> R:
        return base.reference(**given)

    name = base.__name__
    formula.__name__ = formula.__qualname__ = f"vocab_parallel_{name}"
    formula.__module__ = base.__module__
    formula.__doc__ = f"""Deprecated: :func:`{name}` with the arguments `group` and `classes`."""
    formula.__annotations__["return"] = base.result
    formula.__signature__ = inspect.Signature(return_annotation=base.__signature__.return_annotation)  # type: ignore[attr-defined]
    given = base.__signature__.parameters
    added = [given[word].replace(default=inspect.Parameter.empty, kind=POSITIONAL) for word in ("group", "classes")]
    others = [p for word, p in given.items() if word not in ("group", "classes")]
    required = [p for p in others if p.default is p.empty]
    signature = base.__signature__.replace(parameters=[*required, *added, *others[len(required) :]])
    alias = derived(base, signature, base.types, formula)
    alias.alias_of = base
    return alias
