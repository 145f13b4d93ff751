from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ._linear import BYTES_PER_LOGIT, Head, Linear, chunk_size
from ._operator import demand, form_of, hint_if_swapped, operator
from ._split import split_of, splittable, vocab_parallel
from ._wanted import WANT_BIAS, WANT_INPUT, WANT_WEIGHT
from .cross_entropy import (
    REDUCTIONS,
    CrossEntropyMetrics,
    check_options,
    losses_of,
    predictions_of,
    reduced,
    with_metrics,
)


class LogProbabilities(NamedTuple):
    """The loss, and for each position the target's log probability and the entropy of the prediction, in fp32. Only the
    loss has a gradient."""

    loss: Tensor
    log_probs: Tensor
    entropy: Tensor


def plan(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, wanted: int, memory_budget: int | None
) -> tuple[int, int, int, int]:
    """liger::_fused_linear_cross_entropy_plan for these formulas."""
    chunk = min(tokens, chunk_size(vocabulary, memory_budget))
    elements = {WANT_INPUT: tokens * hidden, WANT_WEIGHT: vocabulary * hidden, WANT_BIAS: vocabulary}
    gradients = sum(count for bit, count in elements.items() if wanted & bit)
    chunks = -(-tokens // chunk) if tokens else 0
    return chunk, chunks, chunk * vocabulary * BYTES_PER_LOGIT, gradients * dtype.itemsize


def _no_results(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, ...]:
    return ()


def _log_probs_of(x: Tensor, y: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(log p of the target, entropy of the prediction) of each token."""
    losses = functional.cross_entropy(x, y.long(), None, None, ignore_index, None, "none")
    return -losses, torch.special.entr(x.softmax(-1)).sum(-1).masked_fill(y == ignore_index, 0)


def _of_linear(
    describe: Callable[[Tensor, Tensor, int], tuple[Tensor, ...]],
    op: str, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ce_weight: Tensor | None,
    reduction: str, ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None,
    logits_scale: float, token_weight: Tensor | None, memory_budget: int | None, group: str, classes: int,
    class_sizes: Sequence[int] | None, sequence_dim: int | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(loss, z-loss, results of `describe` per token). `describe` takes logits (tokens, V), targets (tokens,) and
    `ignore_index`."""
    check_options(op, label_smoothing, lse_square_scale, softcap)
    head = Head(input, weight, bias, logits_scale, softcap, "", False, low_rank_input, low_rank_weight)
    linear = Linear(op, [head], memory_budget, split_of(op, group, classes, class_sizes, sequence_dim), target.shape)
    if target.shape != linear.tokens:
        hint = hint_if_swapped("input", linear.inputs[0], "weight", weight, target)
        rule = f"have shape {list(linear.tokens)}, that of input without its last dimension"
        demand(not hint, op, "target", rule, f"{list(target.shape)}{hint}")

    def loss_of(x: Tensor, y: Tensor, factor: Tensor | None) -> tuple[Tensor, ...]:
        losses, z = losses_of(x, y, ce_weight, ignore_index, label_smoothing, lse_square_scale)
        if factor is not None:
            losses, z = losses * factor.to(losses.dtype), z * factor.to(z.dtype)
        return losses, z, *describe(x.detach(), y, ignore_index)

    found = linear.map(loss_of, target.flatten(), None if token_weight is None else token_weight.flatten())
    losses, z, *described = (t.view(target.shape) for t in found)
    return *reduced(losses, z, target, ce_weight, reduction, ignore_index), *described


@operator(constants=("ce_weight", "token_weight"), choices=REDUCTIONS)
@splittable("`weight` and `bias`", "`input`")
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
    group: str = "",
    classes: int = 0,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
    low_rank_input: Tensor | None = None,
    low_rank_weight: Tensor | None = None,
) -> Tensor:
    """:func:`cross_entropy` of ``logits_scale * (input @ weight.T + bias)``, without storing all logits at once.

    input: (..., n), weight: (V, n), target: (...) indices, bias: (V,), ce_weight: (V,) in input's dtype or fp32,
    token_weight: (...) in any floating dtype, low_rank_input: (..., r) in input's dtype or fp32, low_rank_weight: (V, r)
    in input's dtype or fp32 -> a scalar, or (...) with reduction "none", in fp32.

    With `low_rank_input` and `low_rank_weight`, the logits are ``logits_scale * (input @ weight.T + low_rank_input @
    low_rank_weight.T + bias)``: for a head with a LoRA adapter, ``scale * input @ a.T`` and b. Neither the sum of the
    weights nor the logits are stored.

    `ce_weight` is the `weight` of :func:`cross_entropy`, whose options and default reduction this operator has.
    `logits_scale` is finite. `token_weight` multiplies each position's loss; a mean still divides by the number of
    positions that are not ignored, or by the sum of their targets' `ce_weight`, and not by the sum of `token_weight`.
    `memory_budget` limits the bytes of the logits that exist at the same time.

    Cost: one GEMM of tokens, V and n for the logits, and one for each gradient of input and weight. A reduced loss runs
    them all in forward; backward only scales the gradients, and moves nothing if the upstream gradient is 1. With
    reduction "none", backward computes the logits again, with one more GEMM. Without `memory_budget`, the logits of a
    chunk take at most 1280 MiB, and 320 MiB if nothing needs a gradient. Backward of a reduced loss needs the gradients
    alone; with "none" it needs the tensor arguments and three fp32 numbers per position.

    >>> hidden, head, target = torch.ones(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, 2])
    >>> fused_linear_cross_entropy(hidden, head, target)
    tensor(1.3863)
    >>> fused_linear_cross_entropy(hidden, head, target, token_weight=torch.tensor([3.0, 0.0, 3.0]))
    tensor(2.7726)
    """
    return _of_linear(
        _no_results, "fused_linear_cross_entropy", input, weight, target, bias, ce_weight, reduction, ignore_index,
        label_smoothing, lse_square_scale, softcap, logits_scale, token_weight, memory_budget, group,
        classes, class_sizes, sequence_dim, low_rank_input, low_rank_weight,
    )[0]  # fmt: skip


@form_of(fused_linear_cross_entropy)
def fused_linear_cross_entropy_with_metrics(**given: Any) -> CrossEntropyMetrics:
    """:func:`fused_linear_cross_entropy` with its z-loss, the token accuracy and the predicted tokens.

    input: (..., n), weight: (V, n), target: (...) indices, bias and ce_weight: (V,), token_weight: (...), low_rank_input:
    (..., r), low_rank_weight: (V, r).

    >>> hidden, head = torch.eye(2), torch.eye(2)
    >>> fused_linear_cross_entropy_with_metrics(hidden, head, torch.tensor([0, 0])).token_accuracy
    tensor(0.5000)
    """
    loss, z_loss, right, predicted = _of_linear(predictions_of, **given)
    return with_metrics(loss, z_loss, right, predicted, **given)


@form_of(fused_linear_cross_entropy)
def fused_linear_cross_entropy_with_log_probs(**given: Any) -> LogProbabilities:
    """:func:`fused_linear_cross_entropy` with each target's log probability and each prediction's entropy.

    input: (..., n), weight: (V, n), target: (...) indices, bias and ce_weight: (V,), token_weight: (...), low_rank_input:
    (..., r), low_rank_weight: (V, r).

    >>> hidden, head = torch.ones(1, 2), torch.zeros(2, 2)
    >>> fused_linear_cross_entropy_with_log_probs(hidden, head, torch.tensor([0])).log_probs
    tensor([-0.6931])
    """
    loss, _, log_probs, entropy = _of_linear(_log_probs_of, **given)
    return LogProbabilities(loss, log_probs, entropy)


vocab_parallel_fused_linear_cross_entropy = vocab_parallel(fused_linear_cross_entropy)
vocab_parallel_fused_linear_cross_entropy_with_metrics = vocab_parallel(fused_linear_cross_entropy_with_metrics)
vocab_parallel_fused_linear_cross_entropy_with_log_probs = vocab_parallel(fused_linear_cross_entropy_with_log_probs)
