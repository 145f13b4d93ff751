from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._operator import demand, operator
from ._split import group_of, joined, sizes_of
from .cross_entropy import REDUCTIONS, CrossEntropyMetrics, cross_entropy, cross_entropy_with_metrics


def _whole(op: str, logits: Tensor, group: str, classes: int, class_sizes: Sequence[int] | None) -> Tensor:
    ranks = group_of(op, group)
    sizes = sizes_of(op, ranks, classes, class_sizes)
    mine = sizes[ranks.rank()]
    rule = f"have {mine} classes, those of rank {ranks.rank()} of {ranks.size()}"
    demand(logits.shape[-1] == mine, op, "logits", rule, logits.shape[-1])
    return joined(logits, logits.dim() - 1, ranks, sizes)


@operator(constants=("weight",), choices=REDUCTIONS)
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: str,
    classes: int,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    class_sizes: Sequence[int] | None = None,
) -> Tensor:
    """:func:`cross_entropy` of logits whose classes are split over the ranks of a process group.

    logits: (..., V) of this rank's classes, target: (...) indices among all `classes`, weight: (V,) of all classes.
    `group` is the group's name (``group.group_name``). Rank r holds the classes that ``torch.chunk`` gives to part r, or
    ``class_sizes[r]`` of them. Every rank gets the same loss; the gradient needs no communication.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> vocab_parallel_cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]), dist.group.WORLD.group_name, 4)
    tensor(1.3863)
    >>> dist.destroy_process_group()
    """
    whole = _whole("vocab_parallel_cross_entropy", logits, group, classes, class_sizes)
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap)
    return cross_entropy.reference(whole, target, weight, *options)


@operator(constants=("weight",), choices=REDUCTIONS)
def vocab_parallel_cross_entropy_with_metrics(
    logits: Tensor,
    target: Tensor,
    group: str,
    classes: int,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    class_sizes: Sequence[int] | None = None,
) -> CrossEntropyMetrics:
    """:func:`vocab_parallel_cross_entropy` with its z-loss, the token accuracy and the predicted tokens.

    logits: (..., V), target: (...) indices, weight: (V,).

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> logits, name = torch.tensor([[0.0, 1.0]]), dist.group.WORLD.group_name
    >>> vocab_parallel_cross_entropy_with_metrics(logits, torch.tensor([1]), name, 2).predicted_tokens
    tensor([1])
    >>> dist.destroy_process_group()
    """
    whole = _whole("vocab_parallel_cross_entropy_with_metrics", logits, group, classes, class_sizes)
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap)
    return cross_entropy_with_metrics.reference(whole, target, weight, *options)
