from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ._operator import demand, hint_if_swapped, operator, widened
from .cross_entropy import REDUCTIONS
from .fused_linear_cross_entropy import chunk_size
from .jsd import jsd


class LinearDivergence(NamedTuple):
    """The divergence, and the entropy of the student's prediction at each position."""

    divergence: Tensor
    student_entropy: Tensor


@dataclass
class _Model:
    """x: (..., H). whole: makes the logits of all classes from those of `weight`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    whole: Callable[[Tensor], Tensor] = lambda logits: logits

    def logs(self, x: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of logits that were not rounded to the dtype of x."""
        bias = None if self.bias is None else widened(self.bias)
        v = self.scale * self.whole(functional.linear(widened(x), widened(self.weight), bias))
        v = v if self.softcap is None else self.softcap * torch.tanh(v / self.softcap)
        return (v / temperature).log_softmax(-1)


def _of_models(
    op: str,
    student: _Model,
    teacher: _Model,
    classes: int,
    beta: float,
    temperature: float,
    mask: Tensor | None,
    reduction: str,
    token_weight: Tensor | None,
    memory_budget: int | None,
) -> LinearDivergence:
    demand(0 <= beta <= 1, op, "beta", "be between 0 and 1", beta)
    demand(0 < temperature < math.inf, op, "temperature", "be positive and finite", temperature)
    for side, model in (("s", student), ("t", teacher)):
        demand(math.isfinite(model.scale), op, f"{side}_logits_scale", "be finite", model.scale)
        cap = model.softcap
        demand(cap is None or 0 < cap < math.inf, op, f"{side}_softcap", "be positive and finite", cap)
    positive = memory_budget is None or memory_budget > 0
    demand(positive, op, "memory_budget", "be a positive number of bytes", memory_budget)
    shape, have = student.x.shape[:-1], student.weight.shape[0]
    fits = teacher.x.shape[:-1] == shape
    rule = f"have shape [{', '.join(map(str, shape))}, hidden], the positions of s_input"
    hint = ""
    if not fits:
        hint = hint_if_swapped("s_input", student.x, "s_weight", student.weight, teacher.x)
        hint += hint_if_swapped("t_input", teacher.x, "t_weight", teacher.weight, student.x)
    demand(fits, op, "t_input", rule, f"{list(teacher.x.shape)}{hint}")
    same = teacher.weight.shape[0] == have
    demand(same, op, "t_weight", f"have {have} classes like s_weight", teacher.weight.shape[0])

    def of_chunk(s: Tensor, t: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        s_logs, t_logs = student.logs(s, temperature), teacher.logs(t, temperature)
        wide = torch.promote_types(s_logs.dtype, t_logs.dtype)
        found = jsd.reference(s_logs.to(wide), t_logs.to(wide), beta=beta, reduction="none").sum(-1)
        # -inf contributes 0.
        entropy = -(s_logs.exp() * torch.where(s_logs.isneginf(), 0, s_logs)).sum(-1).detach()
        if counted is not None:
            found, entropy = torch.where(counted, found, 0), torch.where(counted, entropy, 0)
        return found, entropy.to(wide)

    students, teachers = (torch.atleast_2d(model.x).flatten(0, -2) for model in (student, teacher))
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
    return _of_models(
        "fused_linear_divergence",
        _Model(s_input, s_weight, s_bias, s_logits_scale, s_softcap),
        _Model(t_input, t_weight, t_bias, t_logits_scale, t_softcap),
        s_weight.shape[0], beta, temperature, mask, reduction, token_weight, memory_budget,
    )  # fmt: skip
