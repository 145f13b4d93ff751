from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._linear import Head, Linear
from ._operator import demand, demand_positive, hint_if_swapped, operator
from ._split import split_of, splittable, vocab_parallel
from .cross_entropy import REDUCTIONS
from .jsd import jsd


class LinearDivergence(NamedTuple):
    """The divergence, and the entropy of the student's prediction at each position. Only the divergence has a
    gradient."""

    divergence: Tensor
    student_entropy: Tensor


def _of_models(
    op: str, s_input: Tensor, s_weight: Tensor, t_input: Tensor, t_weight: Tensor, s_bias: Tensor | None,
    t_bias: Tensor | None, beta: float, temperature: float, s_logits_scale: float, s_softcap: float | None,
    t_logits_scale: float, t_softcap: float | None, mask: Tensor | None, reduction: str, token_weight: Tensor | None,
    memory_budget: int | None, group: str, classes: int, class_sizes: Sequence[int] | None, sequence_dim: int | None,
    vocab_map: Tensor | None, s_low_rank_input: Tensor | None, s_low_rank_weight: Tensor | None,
    t_low_rank_input: Tensor | None, t_low_rank_weight: Tensor | None,
) -> LinearDivergence:  # fmt: skip
    demand(0 <= beta <= 1, op, "beta", "be between 0 and 1", beta)
    demand_positive(op, "temperature", temperature)
    of_student, of_teacher = (s_low_rank_input, s_low_rank_weight), (t_low_rank_input, t_low_rank_weight)
    student = Head(s_input, s_weight, s_bias, s_logits_scale, s_softcap, "s_", True, *of_student)
    teacher = Head(t_input, t_weight, t_bias, t_logits_scale, t_softcap, "t_", True, *of_teacher)
    positions = next((t.shape for t in (mask, token_weight) if t is not None), None)
    split = split_of(op, group, classes, class_sizes, sequence_dim)
    linear = Linear(op, [student, teacher], memory_budget, split, positions)
    shape, (s, t) = linear.tokens, linear.inputs
    fits = t.shape[:-1] == shape
    hint = ""
    if not fits:
        hint = hint_if_swapped("s_input", s, "s_weight", s_weight, t)
        hint += hint_if_swapped("t_input", t, "t_weight", t_weight, s)
    rule = f"have shape [{', '.join(map(str, shape))}, hidden], the positions of s_input"
    demand(fits, op, "t_input", rule, f"{list(t.shape)}{hint}")
    have = s_weight.shape[0]
    if vocab_map is None:
        demand(t_weight.shape[0] == have, op, "t_weight", f"have {have} classes like s_weight", t_weight.shape[0])
    else:
        demand(beta == 0, op, "vocab_map", "be None unless beta is 0", beta)
        demand(split is None, op, "vocab_map", "be None with a group", "both")
        rule = f"have shape [{have}], one teacher class per student class"
        demand(vocab_map.shape == (have,), op, "vocab_map", rule, list(vocab_map.shape))

    def divergence_of(s: Tensor, t: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        s_logs, t_logs = ((logits / temperature).log_softmax(-1) for logits in (s, t))
        wide = torch.promote_types(s_logs.dtype, t_logs.dtype)
        if vocab_map is not None:
            t_logs = t_logs.index_select(-1, vocab_map)
        found = jsd.reference(s_logs.to(wide), t_logs.to(wide), beta=beta, reduction="none").sum(-1)
        # -inf contributes 0.
        entropy = -(s_logs.exp() * torch.where(s_logs.isneginf(), 0, s_logs)).sum(-1).detach()
        if counted is not None:
            found, entropy = torch.where(counted, found, 0), torch.where(counted, entropy, 0)
        return found, entropy.to(wide)

    found = linear.map(divergence_of, None if mask is None else mask.flatten())
    divergences, entropy = (t.view(shape) for t in found)
    weights = torch.ones_like(divergences) if token_weight is None else token_weight.to(divergences.dtype)
    if mask is not None:
        weights = torch.where(mask, weights, 0)
    if token_weight is not None:
        divergences = divergences * weights
    if reduction == "none":
        return LinearDivergence(divergences, entropy)
    total = divergences.sum()
    return LinearDivergence(total if reduction == "sum" else total / weights.sum(), entropy)


@operator(
    constants=("t_input", "t_weight", "t_bias", "token_weight", "t_low_rank_input", "t_low_rank_weight"),
    choices=REDUCTIONS,
)
@splittable("both weights and biases", "`s_input`")
def fused_linear_divergence(
    s_input: Tensor,
    s_weight: Tensor,
    t_input: Tensor,
    t_weight: Tensor,
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
    group: str = "",
    classes: int = 0,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
    vocab_map: Tensor | None = None,
    s_low_rank_input: Tensor | None = None,
    s_low_rank_weight: Tensor | None = None,
    t_low_rank_input: Tensor | None = None,
    t_low_rank_weight: Tensor | None = None,
) -> LinearDivergence:
    """The divergence of a teacher's and a student's predictions, from their hidden states and heads.

    s_input: (..., n), s_weight: (V, n), t_input: (..., m) in any floating dtype, t_weight: (V, m) in t_input's dtype,
    s_bias: (V,), t_bias: (V,) in t_input's dtype, mask: (...) bool, token_weight: (...) in any floating dtype, vocab_map:
    (V,) indices, s_low_rank_input: (..., r) in s_input's dtype or fp32, s_low_rank_weight: (V, r) in s_input's dtype or
    fp32, t_low_rank_input: (..., q) in t_input's dtype or fp32, t_low_rank_weight: (V, q) in t_input's dtype or fp32 ->
    divergence (...), or a scalar if it is reduced, and student_entropy (...), both in fp32.

    Logits are ``softcap(logits_scale * (input @ weight.T + bias)) / temperature``. With p_s and p_t their softmax,
    `beta` 0 is KL(p_t || p_s), 1 is KL(p_s || p_t), and between it is ``beta * KL(p_t || m) + (1 - beta) * KL(p_s ||
    m)`` with ``m = (1 - beta) * p_s + beta * p_t``. `temperature` and the softcaps are positive. Positions where `mask`
    is False count for nothing, and their results are 0. `token_weight` multiplies each position's divergence; a mean
    divides by the sum of the weights. The default reduction is "none", as for the entropy beside it: post-training
    losses weight positions themselves. `memory_budget` limits the bytes of the logits that exist at the same time.

    A model's `low_rank_input` and `low_rank_weight` add ``low_rank_input @ low_rank_weight.T`` to ``input @ weight.T``,
    as an adapter of its head does.

    If the teacher has other classes than the student, `vocab_map` gives the teacher's class of each of the student's.
    t_weight is then (U, m), and t_bias (U,). For `beta` 0 alone, the divergence is the sum over the V classes of
    ``p_t[map] * (log p_t[map] - log p_s)``, with p_t the softmax over all U classes. It may be negative.

    Cost: two GEMMs for the logits of both models, and one for each gradient of s_input and s_weight. A reduced
    divergence runs them all in forward, with two more if the gradient of s_weight would be rounded more than five
    times. With reduction "none", forward runs three if s_input alone takes a gradient; otherwise backward computes the
    logits again, with two more. Without `memory_budget`, logits and their gradients take at most 1280 MiB if the
    divergence is reduced, 640 MiB if s_input alone takes a gradient, and 320 MiB otherwise, but up to 1280 MiB in a
    backward that computes logits. Backward needs the gradients that forward has computed, or the tensor arguments and
    five fp32 numbers per position. With `vocab_map`, five more passes read the teacher's U logits, two of which write
    them. A bias adds one, a scale or a temperature one, a softcap three.

    >>> student, teacher, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.eye(2)
    >>> fused_linear_divergence(student, head, teacher, head)
    LinearDivergence(divergence=tensor([0.4621]), student_entropy=tensor([0.5822]))
    """
    return _of_models(
        "fused_linear_divergence", s_input, s_weight, t_input, t_weight, s_bias, t_bias, beta, temperature,
        s_logits_scale, s_softcap, t_logits_scale, t_softcap, mask, reduction, token_weight, memory_budget, group,
        classes, class_sizes, sequence_dim, vocab_map, s_low_rank_input, s_low_rank_weight, t_low_rank_input,
        t_low_rank_weight,
    )  # fmt: skip


vocab_parallel_fused_linear_divergence = vocab_parallel(fused_linear_divergence)
