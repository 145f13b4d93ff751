from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ._operator import demand, hint_if_swapped, operator, widened
from .fused_linear_cross_entropy import chunk_size
from .log_probs import log_probs as rows_of


class LinearLogProbs(NamedTuple):
    """The log-probabilities of ids, and facts about each position's distribution; these are (0,) if not requested."""

    log_probs: Tensor
    entropy: Tensor
    mean_logits: Tensor
    log_sum_sq_probs: Tensor
    is_top1: Tensor


def _of_linear(
    op: str,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    logits_scale: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    entropy: bool,
    mean_logits: bool,
    log_sum_sq_probs: bool,
    is_top1: bool,
    memory_budget: int | None,
    whole: Callable[[Tensor], Tensor] = lambda logits: logits,
    classes: int | None = None,
) -> LinearLogProbs:
    """whole: makes the logits of all `classes`, if `weight` has a part of them."""
    demand(math.isfinite(logits_scale), op, "logits_scale", "be finite", logits_scale)
    demand(softcap is None or 0 < softcap < math.inf, op, "softcap", "be positive and finite", softcap)
    demand(0 < temperature < math.inf, op, "temperature", "be positive and finite", temperature)
    positive = memory_budget is None or memory_budget > 0
    demand(positive, op, "memory_budget", "be a positive number of bytes", memory_budget)
    tokens = target.shape[: input.dim() - 1]
    rule = f"have shape {list(input.shape[:-1])}, or that with one dimension more"
    fits = target.dim() - len(input.shape[:-1]) in (0, 1) and tokens == input.shape[:-1]
    hint = "" if fits else hint_if_swapped("input", input, "weight", weight, target)
    demand(fits, op, "target", rule, f"{list(target.shape)}{hint}")
    head = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)

    def of_chunk(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        logits = whole(logits_scale * functional.linear(x, *head))
        found = rows_of.reference(logits, ids, temperature, ignore_index, softcap, entropy=entropy)
        ignored = ids == ignore_index
        skipped = ignored.all(1)
        z = widened(logits.detach())
        z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
        twice = (2 * z).logsumexp(-1) - 2 * z.logsumexp(-1)
        top = (ids == z.argmax(-1, keepdim=True)) & ~ignored if z.shape[-1] else torch.zeros_like(ignored)
        return *found, z.mean(-1).masked_fill(skipped, 0), twice.masked_fill(skipped, 0), top

    count = tokens.numel()
    several = target.dim() == input.dim()
    x, ids = input.reshape(count, input.shape[-1]), target.reshape(count, target.shape[-1] if several else 1)
    chunk = chunk_size(weight.shape[0] if classes is None else classes, memory_budget)
    if count <= chunk:
        found = of_chunk(x, ids)
    else:
        # Backward recomputes the logits of a chunk, but not under function transforms, which lack saved-tensor hooks.
        transformed = torch._C._are_functorch_transforms_active()
        parts = [
            of_chunk(*part)
            if transformed
            else checkpoint(of_chunk, *part, use_reentrant=False, preserve_rng_state=False)
            for part in zip(x.split(chunk), ids.split(chunk))
        ]
        found = tuple(map(torch.cat, zip(*parts)))
    logs, entropies, means, squares, tops = found

    def asked(wanted: bool, t: Tensor, shape: torch.Size) -> Tensor:
        return t.reshape(shape) if wanted else t.new_empty(0)

    return LinearLogProbs(
        logs.reshape(target.shape),
        asked(entropy, entropies, tokens),
        asked(mean_logits, means, tokens),
        asked(log_sum_sq_probs, squares, tokens),
        asked(is_top1, tops, target.shape),
    )


@operator()
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
) -> LinearLogProbs:
    """:func:`log_probs` of ``logits_scale * (input @ weight.T + bias)``, without storing all logits at once.

    input: (..., n), weight: (V, n), target: (...) or (..., K) indices, bias: (V,). With z the softcapped logits divided
    by `temperature` and p their softmax: `log_probs` has the shape of `target`, and `entropy`, `mean_logits`, the mean of
    z, and `log_sum_sq_probs`, log(sum of p squared), have that of the positions. `is_top1` says for each id whether it is
    the first with the largest z. Only `log_probs` and `entropy` are differentiable. A position whose ids are all ignored
    has results of 0. `weight` and `bias` may be half precision beside fp32 `input`.

    `entropy_grad` announces that the entropy's gradient will be needed: if `input` alone requires a gradient, this
    spares backward from computing the logits again. `memory_budget` limits the bytes of the logits that exist at the
    same time.

    >>> found = fused_linear_log_probs(torch.ones(3, 2), torch.zeros(4, 2), torch.tensor([0, 1, -100]), entropy=True)
    >>> found.log_probs, found.entropy
    (tensor([-1.3863, -1.3863,  0.0000]), tensor([1.3863, 1.3863, 0.0000]))
    """
    return _of_linear(
        "fused_linear_log_probs", input, weight, target, bias, logits_scale, softcap, temperature, ignore_index,
        entropy, mean_logits, log_sum_sq_probs, is_top1, memory_budget,
    )  # fmt: skip
