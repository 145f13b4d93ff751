from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._operator import operator
from ._split import split_linear
from .fused_linear_log_probs import LinearLogProbs, _of_linear


@operator()
def vocab_parallel_fused_linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    group: str,
    classes: int,
    bias: Tensor | None = None,
    *,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    entropy_grad: bool = False,
    mean_logits: bool = False,
    log_sum_sq_probs: bool = False,
    is_top1: bool = False,
    memory_budget: int | None = None,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
) -> LinearLogProbs:
    """:func:`fused_linear_log_probs` of a head whose classes are split over the ranks of a process group.

    input: (..., n), weight: (V, n) and bias: (V,) of this rank's classes, target: (...) or (..., K) indices among all
    `classes`. `group` is the group's name (``group.group_name``). Rank r holds the classes that ``torch.chunk`` gives to
    part r, or ``class_sizes[r]`` of them. Every rank gets the same results, and the whole gradient of `input`. With
    `sequence_dim`, `input` and its gradient are this rank's equal part along that dimension, while `target` is whole.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> name = dist.group.WORLD.group_name
    >>> hidden, head = torch.ones(3, 2), torch.zeros(4, 2)
    >>> vocab_parallel_fused_linear_log_probs(hidden, head, torch.tensor([0, 1, 2]), name, 4).log_probs
    tensor([-1.3863, -1.3863, -1.3863])
    >>> dist.destroy_process_group()
    """
    op = "vocab_parallel_fused_linear_log_probs"
    x, whole = split_linear(op, input, weight, target.shape, group, classes, class_sizes, sequence_dim)
    return _of_linear(
        op, x, weight, target, bias, logits_scale, softcap, temperature, ignore_index, entropy, mean_logits,
        log_sum_sq_probs, is_top1, memory_budget, whole, classes,
    )  # fmt: skip
