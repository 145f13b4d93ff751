"""Log-probabilities of sequences, under the policy and under a reference model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import functional as F

Metrics = dict[str, Tensor]


def check(holds: bool, loss: str, argument: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{loss}: {argument} must {rule} (got {value})")


class Rule(NamedTuple):
    words: str
    holds: Callable[[float], bool]


POSITIVE = Rule("be positive and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Rule("be finite and not negative", lambda x: 0 <= x < math.inf)
FINITE = Rule("be finite", math.isfinite)
SHARE = Rule("be between 0 and 1", lambda x: 0 <= x <= 1)
SMOOTHING = Rule("be between 0 and 0.5", lambda x: 0 <= x <= 0.5)


def check_numbers(loss: str, rule: Rule, **numbers: float | None) -> None:
    for argument, number in numbers.items():
        check(number is None or rule.holds(number), loss, argument, rule.words, number)


def check_reference(
    loss: str,
    ref_log_probs: Tensor | None,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
) -> None:
    """An argument that is missing or has no effect would change the loss without a word."""
    missing = "ref_hidden" if ref_hidden is None else "ref_weight"
    given = "ref_weight" if ref_hidden is None else "ref_hidden"
    check((ref_hidden is None) == (ref_weight is None), loss, missing, f"be given with {given}", None)
    check(ref_bias is None or ref_hidden is not None, loss, "ref_hidden", "be given with ref_bias", None)
    check(ref_log_probs is None or ref_hidden is None, loss, "ref_hidden", "be None with ref_log_probs", "a Tensor")


def of_sequences(log_probs: Tensor, target: Tensor, average: bool, ignore_index: int) -> Tensor:
    """log_probs, target: (B, S) -> (B,), the sum over the positions that count, or their mean."""
    total = log_probs.sum(-1)
    return total / (target != ignore_index).sum(-1) if average else total


def reference_log_probs(
    target: Tensor,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    ignore_index: int,
    head: dict[str, Any],
) -> Tensor | None:
    """Log-probabilities (B, S) under the reference model, or None without one. head: of the policy, whose adapter it does
    not have."""
    if ref_hidden is None or ref_weight is None:
        return None
    head = {name: value for name, value in head.items() if not name.startswith("low_rank_")}
    with torch.no_grad():
        return F.fused_linear_log_probs(
            ref_hidden, ref_weight, target, ref_bias, ignore_index=ignore_index, **head
        ).log_probs


def check_shape(t: Tensor | None, loss: str, argument: str, *shapes: Sequence[int]) -> None:
    """Other shapes might broadcast to results that mean nothing."""
    if t is not None:
        rule = "have shape " + " or ".join(str(list(shape)) for shape in shapes)
        check(t.shape in [torch.Size(shape) for shape in shapes], loss, argument, rule, list(t.shape))


def reference_of_sequences(
    loss: str,
    target: Tensor,
    ref_log_probs: Tensor | None,
    ref_hidden: Tensor | None,
    ref_weight: Tensor | None,
    ref_bias: Tensor | None,
    average: bool,
    ignore_index: int,
    head: dict[str, Any],
) -> Tensor | None:
    """(B,), given or computed, or None without a reference."""
    check_reference(loss, ref_log_probs, ref_hidden, ref_weight, ref_bias)
    check_shape(ref_log_probs, loss, "ref_log_probs", target.shape[:1])
    if ref_log_probs is not None:
        return ref_log_probs.detach()
    found = reference_log_probs(target, ref_hidden, ref_weight, ref_bias, ignore_index, head)
    return None if found is None else of_sequences(found, target, average, ignore_index)


def detached(**metrics: Tensor) -> Metrics:
    return {name: value.detach() for name, value in metrics.items()}
