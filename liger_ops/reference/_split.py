"""Collectives with gradients, for the formulas of losses whose classes are split over the ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._operator import demand

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


def split_linear(
    op: str,
    input: Tensor,
    weight: Tensor,
    positions: Sequence[int] | None,
    group: str,
    classes: int,
    class_sizes: Sequence[int] | None,
    sequence_dim: int | None,
    prefix: str = "",
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(input for a head whose classes are split, what makes the logits of all classes from this rank's). positions: the
    dimensions of the tokens of all ranks, if known. prefix: of the tensors' names."""
    ranks = group_of(op, group)
    sizes = sizes_of(op, ranks, classes, class_sizes)
    mine = sizes[ranks.rank()]
    rule = f"have {mine} classes, those of rank {ranks.rank()} of {ranks.size()}"
    demand(weight.shape[0] == mine, op, f"{prefix}weight", rule, weight.shape[0])
    x = input
    if sequence_dim is not None:
        dim = sequence_dim % input.dim()
        rule = f"be a dimension of {prefix}input other than the last"
        demand(dim < input.dim() - 1, op, "sequence_dim", rule, sequence_dim)
        have = input.shape[dim]
        if positions is not None:
            rule = f"have {positions[dim]} / {ranks.size()} positions along sequence_dim, the same on every rank"
            demand(have * ranks.size() == positions[dim], op, "input", rule, have)
        x = joined(input, dim, ranks, [have] * ranks.size())
    return shared(x, ranks), lambda logits: joined(logits, logits.dim() - 1, ranks, sizes)
