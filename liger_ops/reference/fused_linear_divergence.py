from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ._operator import demand, operator, widened
from .cross_entropy import REDUCTIONS
from .fused_linear_cross_entropy import chunk_size
from .jsd import jsd


class LinearDivergence(NamedTuple):
    """The divergence, and the entropy of the student's prediction at each position."""

    divergence: Tensor
    student_entropy: Tensor


def _logs(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> Tensor:
    """Log-probabilities of logits that were not rounded to the dtype of x."""
    v = scale * functional.linear(widened(x), widened(weight), None if bias is None else widened(bias))
    v = v if softcap is None else softcap * torch.tanh(v / softcap)
    return (v / temperature).log_softmax(-1)


@operator(constants=("t_input", "t_weight", "t_bias", "token_weight"), choices=REDUCTIONS)
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
) -> LinearDivergence:
    """The divergence of a teacher's and a student's predictions, from their hidden states and heads.

    s_input: (..., n), s_weight: (V, n), t_input: (..., m), t_weight: (V, m), s_bias and t_bias: (V,), mask: (...),
    token_weight: (...). Logits are ``softcap(logits_scale * (input @ weight.T + bias)) / temperature``. With p_s and p_t
    their softmax, `beta` 0 is KL(p_t || p_s), 1 is KL(p_s || p_t), and between it is
    ``beta * KL(p_t || m) + (1 - beta) * KL(p_s || m)`` with ``m = (1 - beta) * p_s + beta * p_t``. Only the student's
    tensors take a gradient, and the entropy has none. Positions where the bool `mask` is False count for nothing, and
    their results are 0. `token_weight` multiplies each position's divergence; a mean divides by the sum of the weights.
    `memory_budget` limits the bytes of the logits that exist at the same time.

    >>> student, teacher, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.eye(2)
    >>> fused_linear_divergence(student, head, teacher, head)
    LinearDivergence(divergence=tensor([0.4621]), student_entropy=tensor([0.5822]))
    """
    op = "fused_linear_divergence"
    demand(0 <= beta <= 1, op, "beta", "be between 0 and 1", beta)
    demand(0 < temperature < math.inf, op, "temperature", "be positive and finite", temperature)
    for side, scale, cap in (("s", s_logits_scale, s_softcap), ("t", t_logits_scale, t_softcap)):
        demand(math.isfinite(scale), op, f"{side}_logits_scale", "be finite", scale)
        demand(cap is None or 0 < cap < math.inf, op, f"{side}_softcap", "be positive and finite", cap)
    positive = memory_budget is None or memory_budget > 0
    demand(positive, op, "memory_budget", "be a positive number of bytes", memory_budget)
    shape, classes = s_input.shape[:-1], s_weight.shape[0]
    fits = t_input.shape[:-1] == shape
    rule = f"have shape [{', '.join(map(str, shape))}, hidden], the positions of s_input"
    demand(fits, op, "t_input", rule, list(t_input.shape))
    demand(t_weight.shape[0] == classes, op, "t_weight", f"have {classes} classes like s_weight", t_weight.shape[0])

    def of_chunk(s: Tensor, t: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        s_logs = _logs(s, s_weight, s_bias, s_logits_scale, s_softcap, temperature)
        t_logs = _logs(t, t_weight, t_bias, t_logits_scale, t_softcap, temperature)
        wide = torch.promote_types(s_logs.dtype, t_logs.dtype)
        found = jsd.reference(s_logs.to(wide), t_logs.to(wide), beta=beta, reduction="none").sum(-1)
        # -inf contributes 0.
        entropy = -(s_logs.exp() * torch.where(s_logs.isneginf(), 0, s_logs)).sum(-1).detach()
        if counted is not None:
            found, entropy = torch.where(counted, found, 0), torch.where(counted, entropy, 0)
        return found, entropy.to(wide)

    students, teachers = torch.atleast_2d(s_input).flatten(0, -2), torch.atleast_2d(t_input).flatten(0, -2)
    counted = None if mask is None else mask.flatten()
    chunk = chunk_size(2 * classes, memory_budget)
    if students.shape[0] <= chunk:
        divergences, entropy = of_chunk(students, teachers, counted)
    else:
        s_parts, t_parts = students.split(chunk), teachers.split(chunk)
        masks = [None] * len(s_parts) if counted is None else counted.split(chunk)
        # Backward recomputes the logits of a chunk, but not under function transforms, which lack saved-tensor hooks.
        transformed = torch._C._are_functorch_transforms_active()
        parts = [
            of_chunk(*part)
            if transformed
            else checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(s_parts, t_parts, masks)
        ]
        divergences, entropy = map(torch.cat, zip(*parts))
    divergences, entropy = divergences.view(shape), entropy.view(shape)
    weights = torch.ones_like(divergences) if token_weight is None else token_weight.to(divergences.dtype)
    if mask is not None:
        weights = torch.where(mask, weights, 0)
    if token_weight is not None:
        divergences = divergences * weights
    if reduction == "none":
        return LinearDivergence(divergences, entropy)
    total = divergences.sum()
    return LinearDivergence(total if reduction == "sum" else total / weights.sum(), entropy)
