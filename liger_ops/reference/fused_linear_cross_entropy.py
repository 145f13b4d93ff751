from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ._operator import demand, hint_if_swapped, operator
from .cross_entropy import REDUCTIONS, CrossEntropyMetrics, _accuracy, _check, _of_tokens, _predictions, _reduced


class LogProbabilities(NamedTuple):
    """The loss, and for each position the target's log probability and the entropy of the prediction."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor


# Eager code stores each logit in its own dtype, and in fp32 before and after the softmax.
BYTES_PER_LOGIT = 16


def chunk_size(classes: int, memory_budget: int | None) -> int:
    """Number of tokens whose logits may exist at the same time."""
    return max(1, (1 << 30 if memory_budget is None else memory_budget) // (BYTES_PER_LOGIT * max(1, classes)))


def plan(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, wanted: int, memory_budget: int | None
) -> tuple[int, int, int, int]:
    """liger::_fused_linear_cross_entropy_plan for these formulas."""
    chunk = min(tokens, chunk_size(vocabulary, memory_budget))
    elements = {4: tokens * hidden, 8: vocabulary * hidden, 16: vocabulary}
    gradients = sum(count for bit, count in elements.items() if wanted & bit)
    chunks = -(-tokens // chunk) if tokens else 0
    return chunk, chunks, chunk * vocabulary * BYTES_PER_LOGIT, gradients * dtype.itemsize


def _no_results(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return ()


def _of_linear(
    op: str,
    describe: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    input: Tensor,
    weight: Tensor,
    target: Tensor,
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
    whole: Callable[[Tensor], Tensor] = lambda logits: logits,
    classes: int | None = None,
) -> tuple[Tensor, ...]:
    """(loss, z-loss, results of `describe` per token). `describe` takes logits (tokens, V) and targets (tokens,).
    whole: makes the logits of all `classes`, if `weight` has a part of them."""
    _check(op, label_smoothing, lse_square_scale, softcap)
    demand(math.isfinite(logits_scale), op, "logits_scale", "be finite", logits_scale)
    positive = memory_budget is None or memory_budget > 0
    demand(positive, op, "memory_budget", "be a positive number of bytes", memory_budget)
    if target.shape != input.shape[:-1]:
        hint = hint_if_swapped("input", input, "weight", weight, target)
        rule = f"have shape {list(input.shape[:-1])}, that of input without its last dimension"
        demand(not hint, op, "target", rule, f"{list(target.shape)}{hint}")

    def of_chunk(x: Tensor, y: Tensor, factor: Tensor | None) -> tuple[Tensor, ...]:
        logits = whole(logits_scale * functional.linear(x, weight, bias))
        losses, z, seen = _of_tokens(logits, y, ce_weight, ignore_index, label_smoothing, lse_square_scale, softcap)
        if factor is not None:
            losses, z = losses * factor.to(losses.dtype), z * factor.to(z.dtype)
        return losses, z, *describe(seen.detach(), y)

    rows, y = torch.atleast_2d(input).flatten(0, -2), target.flatten()
    factor = None if token_weight is None else token_weight.flatten()
    chunk = chunk_size(weight.shape[0] if classes is None else classes, memory_budget)
    if y.shape[0] <= chunk:
        found = of_chunk(rows, y, factor)
    else:
        x_parts, y_parts = rows.split(chunk), y.split(chunk)
        factors = [None] * len(y_parts) if factor is None else factor.split(chunk)
        # Backward recomputes the logits of a chunk, but not under function transforms, which lack saved-tensor hooks.
        transformed = torch._C._are_functorch_transforms_active()
        parts = [
            of_chunk(*part)
            if transformed
            else checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(x_parts, y_parts, factors)
        ]
        found = tuple(map(torch.cat, zip(*parts)))
    losses, z, *described = (t.view(target.shape) for t in found)
    return *_reduced(losses, z, target, ce_weight, reduction, ignore_index), *described


def _log_probs(x: Tensor, y: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(log p of the target, entropy of the prediction) of each token."""
    losses = functional.cross_entropy(x, y.long(), None, None, ignore_index, None, "none")
    return -losses, torch.special.entr(x.softmax(-1)).sum(-1).masked_fill(y == ignore_index, 0)


@operator(constants=("ce_weight", "token_weight"), choices=REDUCTIONS)
def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
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
) -> Tensor:
    """:func:`cross_entropy` of ``logits_scale * (input @ weight.T + bias)``, without storing all logits at once.

    input: (..., n), weight: (V, n), target: (...) indices, bias and ce_weight: (V,), token_weight: (...).
    `token_weight` multiplies each position's loss. `memory_budget` limits the bytes of the logits that exist at the
    same time.

    >>> fused_linear_cross_entropy(torch.ones(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, 2]))
    tensor(1.3863)
    """
    return _of_linear(
        "fused_linear_cross_entropy", _no_results, input, weight, target, bias, ce_weight, reduction, ignore_index,
        label_smoothing, lse_square_scale, softcap, logits_scale, token_weight, memory_budget,
    )[0]  # fmt: skip


@operator(constants=("ce_weight", "token_weight"), choices=REDUCTIONS)
def fused_linear_cross_entropy_with_metrics(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
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
) -> CrossEntropyMetrics:
    """:func:`fused_linear_cross_entropy` with its z-loss, the token accuracy and the predicted tokens.

    input: (..., n), weight: (V, n), target: (...) indices, bias and ce_weight: (V,), token_weight: (...).

    >>> hidden, head = torch.eye(2), torch.eye(2)
    >>> fused_linear_cross_entropy_with_metrics(hidden, head, torch.tensor([0, 0])).token_accuracy
    tensor(0.5000)
    """
    loss, z_loss, right, predicted = _of_linear(
        "fused_linear_cross_entropy_with_metrics", lambda x, y: _predictions(x, y, ignore_index), input, weight,
        target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap, logits_scale,
        token_weight, memory_budget,
    )  # fmt: skip
    return CrossEntropyMetrics(loss, z_loss, _accuracy(right, target, reduction, ignore_index), predicted)


@operator(constants=("ce_weight", "token_weight"), choices=REDUCTIONS)
def fused_linear_cross_entropy_with_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
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
) -> LogProbabilities:
    """:func:`fused_linear_cross_entropy` with each target's log probability and each prediction's entropy.

    input: (..., n), weight: (V, n), target: (...) indices, bias and ce_weight: (V,), token_weight: (...).

    >>> hidden, head = torch.ones(1, 2), torch.zeros(2, 2)
    >>> fused_linear_cross_entropy_with_log_probs(hidden, head, torch.tensor([0])).log_probs
    tensor([-0.6931])
    """

    loss, _, log_probs, entropy = _of_linear(
        "fused_linear_cross_entropy_with_log_probs", lambda x, y: _log_probs(x, y, ignore_index), input, weight, target, bias, ce_weight, reduction,
        ignore_index, label_smoothing, lse_square_scale, softcap, logits_scale, token_weight, memory_budget,
    )  # fmt: skip
    return LogProbabilities(loss, log_probs, entropy)
