from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ._operator import operator
from ._split import split_linear
from .cross_entropy import REDUCTIONS, CrossEntropyMetrics, _accuracy, _predictions
from .fused_linear_cross_entropy import LogProbabilities, _log_probs, _no_results, _of_linear


def _of_split(
    op: str,
    describe: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    group: str,
    classes: int,
    bias: Tensor | None,
    ce_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
    logits_scale: float,
    token_weight: Tensor | None,
    memory_budget: int | None,
    class_sizes: Sequence[int] | None,
    sequence_dim: int | None,
) -> tuple[Tensor, ...]:
    x, whole = split_linear(op, input, weight, target.shape, group, classes, class_sizes, sequence_dim)
    return _of_linear(
        op, describe, x, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale,
        softcap, logits_scale, token_weight, memory_budget, whole, classes,
    )  # fmt: skip


@operator(constants=("ce_weight", "token_weight"), choices=REDUCTIONS)
def vocab_parallel_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    group: str,
    classes: int,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    logits_scale: float = 1.0,
    token_weight: Tensor | None = None,
    memory_budget: int | None = None,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """:func:`fused_linear_cross_entropy` of a head whose classes are split over the ranks of a process group.

    input: (..., n), weight: (V, n) and bias: (V,) of this rank's classes, target: (...) indices among all `classes`,
    ce_weight: (V,) of all classes, token_weight: (...). `group` is the group's name (``group.group_name``). Rank r holds
    the classes that ``torch.chunk`` gives to part r, or ``class_sizes[r]`` of them. Every rank gets the same loss, and
    the whole gradient of `input`. With `sequence_dim`, `input` and its gradient are this rank's equal part along that
    dimension, while `target` and `token_weight` are whole.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> name = dist.group.WORLD.group_name
    >>> hidden, head = torch.ones(3, 2), torch.zeros(4, 2)
    >>> vocab_parallel_fused_linear_cross_entropy(hidden, head, torch.tensor([0, 1, 2]), name, 4)
    tensor(1.3863)
    >>> dist.destroy_process_group()
    """
    loss, *_ = _of_split(
        "vocab_parallel_fused_linear_cross_entropy", _no_results, input, weight,
        target, group, classes, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
        logits_scale, token_weight, memory_budget, class_sizes, sequence_dim,
    )  # fmt: skip
    return loss


@operator(constants=("ce_weight", "token_weight"), choices=REDUCTIONS)
def vocab_parallel_fused_linear_cross_entropy_with_metrics(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    group: str,
    classes: int,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    logits_scale: float = 1.0,
    token_weight: Tensor | None = None,
    memory_budget: int | None = None,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
) -> CrossEntropyMetrics:
    """:func:`vocab_parallel_fused_linear_cross_entropy` with its z-loss, token accuracy and predicted tokens.

    input: (..., n), weight: (V, n), target: (...) indices, bias and ce_weight: (V,), token_weight: (...).

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> name = dist.group.WORLD.group_name
    >>> hidden, head = torch.eye(2), torch.eye(2)
    >>> vocab_parallel_fused_linear_cross_entropy_with_metrics(
    ...     hidden, head, torch.tensor([0, 0]), name, 2
    ... ).token_accuracy
    tensor(0.5000)
    >>> dist.destroy_process_group()
    """
    loss, z_loss, right, predicted = _of_split(
        "vocab_parallel_fused_linear_cross_entropy_with_metrics", lambda x, y: _predictions(x, y, ignore_index), input, weight,
        target, group, classes, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
        logits_scale, token_weight, memory_budget, class_sizes, sequence_dim,
    )  # fmt: skip
    return CrossEntropyMetrics(loss, z_loss, _accuracy(right, target, reduction, ignore_index), predicted)


@operator(constants=("ce_weight", "token_weight"), choices=REDUCTIONS)
def vocab_parallel_fused_linear_cross_entropy_with_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    group: str,
    classes: int,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    logits_scale: float = 1.0,
    token_weight: Tensor | None = None,
    memory_budget: int | None = None,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
) -> LogProbabilities:
    """:func:`vocab_parallel_fused_linear_cross_entropy` with log probabilities of targets and entropies.

    input: (..., n), weight: (V, n), target: (...) indices, bias and ce_weight: (V,), token_weight: (...).

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> name = dist.group.WORLD.group_name
    >>> hidden, head = torch.ones(1, 2), torch.zeros(2, 2)
    >>> vocab_parallel_fused_linear_cross_entropy_with_log_probs(
    ...     hidden, head, torch.tensor([0]), name, 2
    ... ).log_probs
    tensor([-0.6931])
    >>> dist.destroy_process_group()
    """
    loss, _, log_probs, entropy = _of_split(
        "vocab_parallel_fused_linear_cross_entropy_with_log_probs", lambda x, y: _log_probs(x, y, ignore_index), input, weight,
        target, group, classes, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
        logits_scale, token_weight, memory_budget, class_sizes, sequence_dim,
    )  # fmt: skip
    return LogProbabilities(loss, log_probs, entropy)
