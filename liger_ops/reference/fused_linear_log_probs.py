from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._linear import Head, Linear
from ._operator import demand, demand_positive, form_of, hint_if_swapped, operator
from ._split import split_of, splittable, vocab_parallel
from .log_probs import log_probs as rows_of


class LinearLogProbs(NamedTuple):
    """The log-probabilities of ids, and facts about each position's distribution; these are (0,) if not requested.
    Only `log_probs` and `entropy` have gradients. `is_top1` is bool, the others are fp32."""

    log_probs: Tensor
    entropy: Tensor
    mean_logits: Tensor
    log_sum_sq_probs: Tensor
    is_top1: Tensor


class LinearLogProbsWithLogSumExp(NamedTuple):
    """:class:`LinearLogProbs`, and log(sum of exp(z)) of each position, in fp32, which has a gradient."""

    log_probs: Tensor
    entropy: Tensor
    mean_logits: Tensor
    log_sum_sq_probs: Tensor
    is_top1: Tensor
    log_sum_exp: Tensor


def _of_linear(
    op: str, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, logits_scale: float,
    softcap: float | None, temperature: float, ignore_index: int, entropy: bool, entropy_grad: bool, mean_logits: bool,
    log_sum_sq_probs: bool, is_top1: bool, memory_budget: int | None, group: str, classes: int,
    class_sizes: Sequence[int] | None, sequence_dim: int | None, low_rank_input: Tensor | None,
    low_rank_weight: Tensor | None,
) -> LinearLogProbsWithLogSumExp:  # fmt: skip
    demand_positive(op, "temperature", temperature)
    same_bias = None if bias is None else bias.to(input.dtype)
    head = Head(
        input, weight.to(input.dtype), same_bias, logits_scale, softcap, "", False, low_rank_input, low_rank_weight
    )
    linear = Linear(op, [head], memory_budget, split_of(op, group, classes, class_sizes, sequence_dim), target.shape)
    tokens = linear.tokens
    rule = f"have shape {list(tokens)}, or that with one dimension more"
    fits = target.dim() - len(tokens) in (0, 1) and target.shape[: len(tokens)] == tokens
    hint = "" if fits else hint_if_swapped("input", linear.inputs[0], "weight", weight, target)
    demand(fits, op, "target", rule, f"{list(target.shape)}{hint}")

    def facts_of(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        found = rows_of.reference(x, ids, temperature, ignore_index, entropy=entropy)
        ignored = ids == ignore_index
        skipped = ignored.all(1)
        z = x.detach() / temperature
        twice = (2 * z).logsumexp(-1) - 2 * z.logsumexp(-1)
        top = (ids == z.argmax(-1, keepdim=True)) & ~ignored if z.shape[-1] else torch.zeros_like(ignored)
        normaliser = (x / temperature).logsumexp(-1).masked_fill(skipped, 0)
        return *found, z.mean(-1).masked_fill(skipped, 0), twice.masked_fill(skipped, 0), top, normaliser

    ids = target.reshape(tokens.numel(), target.shape[-1] if target.dim() == input.dim() else 1)
    logs, *facts = linear.map(facts_of, ids)
    wanted = (
        (entropy, tokens), (mean_logits, tokens), (log_sum_sq_probs, tokens), (is_top1, target.shape),
        (True, tokens),
    )  # fmt: skip
    described = (t.reshape(shape) if requested else t.new_empty(0) for t, (requested, shape) in zip(facts, wanted))
    return LinearLogProbsWithLogSumExp(logs.reshape(target.shape), *described)


@operator()
@splittable("`weight` and `bias`", "`input`")
def fused_linear_log_probs(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
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
    group: str = "",
    classes: int = 0,
    class_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
    low_rank_input: Tensor | None = None,
    low_rank_weight: Tensor | None = None,
) -> LinearLogProbs:
    """:func:`log_probs` of ``logits_scale * (input @ weight.T + bias)``, without storing all logits at once.

    input: (..., n), weight: (V, n) in input's dtype, or half precision beside fp32, target: (...) or (..., K) indices,
    bias: (V,) in weight's dtype, low_rank_input: (..., r) in input's dtype or fp32, low_rank_weight: (V, r) in input's
    dtype or fp32.

    With `low_rank_input` and `low_rank_weight`, the logits are ``logits_scale * (input @ weight.T + low_rank_input @
    low_rank_weight.T + bias)``, those of a head with an adapter, which counts as a part of the head below.

    With z the softcapped logits divided by `temperature` and p their softmax: `log_probs` has the shape of `target`,
    and `entropy`, `mean_logits`, the mean of z, and `log_sum_sq_probs`, log(sum of p squared), have that of the
    positions. `is_top1` says for each id whether it is the first with the largest z. A position whose ids are all
    ignored has results of 0. `temperature` and `softcap` are positive.

    Results and gradients are those of fp32 logits (fp64 for fp64).

    `entropy_grad` announces that the entropy's gradient will be needed: if `input` alone requires a gradient, this
    spares backward from computing the logits again. `memory_budget` limits the bytes of the logits that exist at the
    same time.

    Cost: one GEMM of tokens, V and n without gradients. If input alone takes a gradient, forward runs a second one, and
    a third with `entropy_grad`; without it, a gradient of the entropy makes it four in all. If the head takes a
    gradient, backward computes the logits again: three in all, or four with the gradient of input. Without
    `memory_budget`, logits take at most 320 MiB in forward without gradients, 640 MiB in forward that computes them,
    and 320 to 1280 MiB in backward. If the head takes a gradient, backward needs the tensor arguments, three fp32
    numbers per position and one per id. For input alone it needs the target and its gradient for upstream gradients of
    1, |input|, and as much again with `entropy_grad`; with several ids per position also the weight and these
    numbers; with `entropy` but without `entropy_grad`, or with `sequence_dim`, the tensor arguments and these
    numbers. With `sequence_dim` forward makes no gradient.

    >>> found = fused_linear_log_probs(torch.ones(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, -100]), entropy=True)
    >>> found.log_probs, found.entropy
    (tensor([-1.3863, -1.3863,  0.0000]), tensor([1.3863, 1.3863, 0.0000]))
    """
    found = _of_linear(
        "fused_linear_log_probs", input, weight, target, bias, logits_scale, softcap, temperature, ignore_index,
        entropy, entropy_grad, mean_logits, log_sum_sq_probs, is_top1, memory_budget, group, classes, class_sizes,
        sequence_dim, low_rank_input, low_rank_weight,
    )  # fmt: skip
    return LinearLogProbs(*found[:-1])


@form_of(fused_linear_log_probs)
def fused_linear_log_probs_with_log_sum_exp(**given: Any) -> LinearLogProbsWithLogSumExp:
    """:func:`fused_linear_log_probs` with log(sum of exp(z)) of each position, which has a gradient.

    input: (..., n), weight: (V, n), target: (...) or (..., K) indices, bias: (V,), low_rank_input: (..., r),
    low_rank_weight: (V, r).

    A log-probability plus it is the id's z, and the z of another id minus it is a log-probability. A position whose ids are
    all ignored has 0.

    Cost: as there. If input alone takes a gradient, backward also needs the weight, three fp32 numbers per position and one
    per id.

    >>> found = fused_linear_log_probs_with_log_sum_exp(torch.ones(1, 2), torch.ones(4, 2), torch.tensor([0]))
    >>> found.log_sum_exp
    tensor([3.3863])
    """
    return _of_linear(**given)


vocab_parallel_fused_linear_log_probs = vocab_parallel(fused_linear_log_probs)
