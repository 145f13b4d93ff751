from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._operator import operator
from ._split import split_linear
from .cross_entropy import REDUCTIONS
from .fused_linear_divergence import LinearDivergence, _Model, _of_models


@operator(constants=("t_input", "t_weight", "t_bias", "token_weight"), choices=REDUCTIONS)
def vocab_parallel_fused_linear_divergence(
    s_input: Tensor,
    s_weight: Tensor,
    t_input: Tensor,
    t_weight: Tensor,
    group: str,
    classes: int,
    s_bias: Tensor | None = None,
    t_bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    s_logits_scale: float = 1.0,
    s_softcap: float | None = None,
    t_logits_scale: float = 1.0,
    t_softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    token_weight: Tensor | None = None,
    memory_budget: int | None = None,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
) -> LinearDivergence:
    """:func:`fused_linear_divergence` of heads whose classes are split over the ranks of a process group.

    s_input: (..., n), t_input: (..., m), s_weight: (V, n), t_weight: (V, m), s_bias and t_bias: (V,) of this rank's
    classes, mask: (...), token_weight: (...). Both heads are split alike. `group` is the group's name
    (``group.group_name``), and `classes` the number of all classes. Rank r holds the classes that ``torch.chunk`` gives to
    part r, or ``class_sizes[r]`` of them. Every rank gets the same results, and the whole gradient of `s_input`. With
    `sequence_dim`, the inputs and the gradient of `s_input` are this rank's equal part along that dimension, while `mask`,
    `token_weight` and the results are whole.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> name = dist.group.WORLD.group_name
    >>> student, teacher, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.eye(2)
    >>> vocab_parallel_fused_linear_divergence(student, head, teacher, head, name, 2).divergence
    tensor([0.4621])
    >>> dist.destroy_process_group()
    """
    op = "vocab_parallel_fused_linear_divergence"
    split = group, classes, class_sizes, sequence_dim
    positions = next((t.shape for t in (mask, token_weight) if t is not None), None)
    student, whole = split_linear(op, s_input, s_weight, positions, *split, prefix="s_")
    teacher, _ = split_linear(op, t_input, t_weight, positions, *split, prefix="t_")
    return _of_models(
        op,
        _Model(student, s_weight, s_bias, s_logits_scale, s_softcap, whole),
        _Model(teacher, t_weight, t_bias, t_logits_scale, t_softcap, whole),
        classes, beta, temperature, mask, reduction, token_weight, memory_budget,
    )  # fmt: skip
