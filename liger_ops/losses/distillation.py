"""Distillation: divergences of the student's distribution from a teacher's, with the cross entropy of hard targets."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ._chunks import in_chunks, logits_of, summed, widened
from ._sequences import NOT_NEGATIVE, POSITIVE, SHARE, Metrics, check, check_numbers, check_shape, detached


def share_of(counted: Tensor, num_items: Tensor | float | None, factor: float, dtype: torch.dtype) -> Tensor:
    """Weights of positions with which a sum is `factor` times the mean. The operators multiply by them at no cost,
    whereas a factor of the loss would take another pass over its gradients."""
    count = counted.sum() if num_items is None else torch.as_tensor(num_items, device=counted.device)
    return (factor / count.to(torch.promote_types(dtype, torch.float32)).clamp(min=1)).expand(counted.shape)


def check_options(
    loss: str, temperature: float, soft_weight: float, hard_weight: float, num_items: Tensor | float | None
) -> None:
    check_numbers(loss, POSITIVE, temperature=temperature)
    check_numbers(loss, NOT_NEGATIVE, soft_weight=soft_weight, hard_weight=hard_weight)
    if not isinstance(num_items, Tensor):  # whose value may be on a device
        check_numbers(loss, NOT_NEGATIVE, num_items_in_batch=num_items)


def hard_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, share: Tensor, ignore_index: int, head: dict
) -> Tensor:
    return F.fused_linear_cross_entropy(
        hidden, weight, target, bias, reduction="sum", ignore_index=ignore_index, token_weight=share, **head
    )


def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    mask: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    teacher_logits_scale: float = 1.0,
    teacher_softcap: float | None = None,
    vocab_map: Tensor | None = None,
    memory_budget: int | None = None,
    low_rank_input: Tensor | None = None,
    low_rank_weight: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """``soft_weight * divergence + hard_weight * cross entropy``, sums over the positions that count, divided by their
    number or by `num_items_in_batch`.

    hidden: (..., n), weight: (V, n), teacher_hidden: (..., n'), teacher_weight: (V, n'), target, mask: (...), bias,
    teacher_bias: (V,). beta 0 is KL(teacher || student), 1 is KL(student || teacher), between them the Jensen-Shannon
    divergence with mixture ``(1 - beta) p_student + beta p_teacher``. Positions count by `mask`, or where `target` is
    not `ignore_index`. `temperature` applies to the divergence, without a factor of its square. The teacher takes no
    gradient. `vocab_map` (V,): the teacher's class of each of the student's, for a teacher of other classes and beta 0.
    low_rank_input (..., r) and low_rank_weight (V, r) belong to an adapter of the student's head.

    The two terms project the student twice: seven GEMMs in all, four without the hard term.
    """
    check_numbers("distillation_loss", SHARE, beta=beta)
    check_options("distillation_loss", temperature, soft_weight, hard_weight, num_items_in_batch)
    check(target is not None or hard_weight == 0, "distillation_loss", "target", "be given with hard_weight", None)
    if mask is None:
        shape = hidden.shape[:-1]
        mask = (
            target != ignore_index if target is not None else torch.ones(shape, dtype=torch.bool, device=hidden.device)
        )
    check_shape(mask, "distillation_loss", "mask", hidden.shape[:-1])
    check_shape(target, "distillation_loss", "target", hidden.shape[:-1])
    counted = mask != 0
    soft, entropy = F.fused_linear_divergence(
        hidden, weight, teacher_hidden.detach(), teacher_weight.detach(), bias,
        None if teacher_bias is None else teacher_bias.detach(), beta=beta, temperature=temperature,
        s_logits_scale=logits_scale, s_softcap=softcap, t_logits_scale=teacher_logits_scale, t_softcap=teacher_softcap,
        mask=counted, reduction="sum", memory_budget=memory_budget, vocab_map=vocab_map,
        token_weight=share_of(counted, num_items_in_batch, soft_weight, hidden.dtype),
        s_low_rank_input=low_rank_input, s_low_rank_weight=low_rank_weight,
    )  # fmt: skip
    metrics = detached(soft=soft / soft_weight if soft_weight else soft)
    metrics["student_entropy"] = entropy.sum() / counted.sum().clamp(min=1)
    if hard_weight == 0 or target is None:
        return soft, metrics
    head = {"logits_scale": logits_scale, "softcap": softcap, "memory_budget": memory_budget,
            "low_rank_input": low_rank_input, "low_rank_weight": low_rank_weight}  # fmt: skip
    share = share_of(counted, num_items_in_batch, hard_weight, hidden.dtype)
    hard = hard_loss(hidden, weight, target.masked_fill(~counted, ignore_index), bias, share, ignore_index, head)
    return soft + hard, {**metrics, **detached(hard=hard / hard_weight)}


# ---- Teachers of few classes


def with_tail(log_probs: Tensor) -> Tensor:
    """(..., K) -> (..., K + 1): the last bucket holds the probability of all other classes."""
    # Rounding may take the sum to 1, whose logarithm below would be -inf.
    inside = log_probs.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(log_probs.dtype).eps)
    return torch.cat([log_probs, torch.log(-torch.expm1(inside))], -1)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence (...) of log-probabilities (..., K), as `fused_linear_divergence` defines it."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        # A probability of 0 contributes 0.
        return torch.where(p.isneginf(), 0, p.exp() * (p - q)).sum(-1)

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def topk_distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    beta: float = 0.0,
    tail: bool = True,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    mask: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    low_rank_input: Tensor | None = None,
    low_rank_weight: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """:func:`distillation_loss` of a teacher of which only the likeliest classes are known.

    hidden: (..., n), weight: (V, n), teacher_ids, teacher_log_probs: (..., K), target, mask: (...), bias: (V,),
    low_rank_input: (..., r) and low_rank_weight: (V, r), of an adapter of the head. Ids
    of one position must differ; an id `ignore_index` is a missing one. With `tail`, the other classes are one more
    bucket of both distributions; without it, they do not count. `temperature` is that of the teacher's
    log-probabilities.

    The student is projected once for both terms, if the temperature is 1: the hard target is one more id.
    """
    check_numbers("topk_distillation_loss", SHARE, beta=beta)
    check_options("topk_distillation_loss", temperature, soft_weight, hard_weight, num_items_in_batch)
    shape = teacher_ids.shape
    rule = f"have shape {[*hidden.shape[:-1], 'K']}"
    check(shape[:-1] == hidden.shape[:-1], "topk_distillation_loss", "teacher_ids", rule, list(shape))
    check_shape(teacher_log_probs, "topk_distillation_loss", "teacher_log_probs", shape)
    check(target is not None or hard_weight == 0, "topk_distillation_loss", "target", "be given with hard_weight", None)
    known = teacher_ids != ignore_index
    if mask is None:
        mask = target != ignore_index if target is not None else known.any(-1)
    check_shape(mask, "topk_distillation_loss", "mask", hidden.shape[:-1])
    check_shape(target, "topk_distillation_loss", "target", hidden.shape[:-1])
    counted = mask != 0
    known = known & counted.unsqueeze(-1)
    ids = teacher_ids.masked_fill(~known, ignore_index)
    hard_ids = None if target is None or hard_weight == 0 else target.masked_fill(~counted, ignore_index)
    together = temperature == 1
    if together and hard_ids is not None:
        ids = torch.cat([ids, hard_ids.unsqueeze(-1)], -1)
    head: dict[str, Any] = {"logits_scale": logits_scale, "softcap": softcap, "memory_budget": memory_budget,
                            "low_rank_input": low_rank_input, "low_rank_weight": low_rank_weight}  # fmt: skip
    found = F.fused_linear_log_probs(
        hidden, weight, ids, bias, temperature=temperature, ignore_index=ignore_index, **head
    ).log_probs
    student = found[..., : shape[-1]].masked_fill(~known, -math.inf)
    teacher = teacher_log_probs.detach().to(student.dtype).masked_fill(~known, -math.inf)
    if tail:
        student, teacher = with_tail(student), with_tail(teacher)
    soft = divergence(student, teacher, beta) * share_of(counted, num_items_in_batch, 1.0, student.dtype)
    soft = soft.masked_fill(~counted, 0).sum()
    metrics = detached(soft=soft)
    if hard_ids is None:
        return soft_weight * soft, metrics
    share = share_of(counted, num_items_in_batch, 1.0, student.dtype)
    if together:
        hard = -(found[..., -1] * share).sum()
    else:
        hard = hard_loss(hidden, weight, hard_ids, bias, share, ignore_index, head)
    return soft_weight * soft + hard_weight * hard, {**metrics, **detached(hard=hard)}


# ---- Whole distributions as targets


def target_distribution_loss(
    hidden: Tensor,
    weight: Tensor,
    probabilities: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    eps: float = 0.0,
    memory_budget: int | None = None,
) -> Tensor:
    """KL(target || student) of every position, from stored distributions. hidden: (..., n), weight: (V, n),
    probabilities: (..., V), bias: (V,), mask: (...) -> (...), 0 where the mask is. A probability below `eps` has the
    logarithm of `eps`."""
    name, rows = "target_distribution_loss", hidden.shape[:-1]
    check_numbers(name, POSITIVE, temperature=temperature, memory_budget=memory_budget)
    check_numbers(name, NOT_NEGATIVE, eps=eps)
    check_shape(probabilities, name, "probabilities", (*rows, len(weight)))
    check_shape(mask, name, "mask", rows)
    keep = torch.ones(rows, dtype=torch.bool, device=hidden.device) if mask is None else mask != 0

    head, of_classes = summed(weight), summed(bias)

    def of_chunk(x: Tensor, p: Tensor, counted: Tensor) -> tuple[Tensor]:
        log_q, p = logits_of(x, head, of_classes, temperature).log_softmax(-1), widened(p)
        losses = p * (torch.where(p == 0, 0, p.clamp(min=eps).log()) - log_q)
        return (torch.where(counted, losses.sum(-1), 0),)

    flat = hidden.flatten(0, -2), probabilities.detach().flatten(0, -2), keep.flatten()
    return in_chunks(of_chunk, flat, len(weight), memory_budget)[0].view(rows)
