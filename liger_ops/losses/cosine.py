"""Distillation by the angle between the logits of student and teacher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from ._chunks import in_chunks, logits_of, summed
from ._sequences import NOT_NEGATIVE, POSITIVE, Metrics, check, check_numbers, check_shape, detached


def cosine_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    memory_budget: int | None = None,
) -> tuple[Tensor, Metrics]:
    """``soft_weight * (1 - cosine similarity of the logits) + hard_weight * cross entropy``, the mean over the
    positions that count.

    hidden: (..., n), weight: (V, n), teacher_hidden: (..., n'), teacher_weight: (V, n'), target: (...), bias,
    teacher_bias: (V,). The teacher takes no gradient. Both terms share the student's projection.
    """
    name, classes, positions = "cosine_distillation_loss", len(weight), hidden.shape[:-1]
    check_numbers(name, NOT_NEGATIVE, soft_weight=soft_weight, hard_weight=hard_weight)
    check_numbers(name, POSITIVE, memory_budget=memory_budget)
    check(
        len(teacher_weight) == classes, name, "teacher_weight", f"have {classes} rows, as weight", len(teacher_weight)
    )
    check_shape(target, name, "target", positions)
    check_shape(teacher_hidden, name, "teacher_hidden", (*positions, teacher_weight.shape[-1]))
    check_shape(bias, name, "bias", (classes,))
    check_shape(teacher_bias, name, "teacher_bias", (classes,))
    y = target.flatten()
    head, of_classes = summed(weight), summed(bias)
    count = (y != ignore_index).sum().clamp(min=1)

    def terms(x: Tensor, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        student = logits_of(x, head, of_classes)
        with torch.no_grad():
            teacher = logits_of(t, teacher_weight, teacher_bias)
        hard = cross_entropy(student, labels, ignore_index=ignore_index, reduction="none")
        return (1 - cosine_similarity(student, teacher, -1)).masked_fill(labels == ignore_index, 0), hard

    rows = hidden.flatten(0, -2), teacher_hidden.flatten(0, -2), y
    soft, hard = (t.sum() / count for t in in_chunks(terms, rows, classes, memory_budget))
    return soft_weight * soft + hard_weight * hard, detached(soft=soft, hard=hard)
