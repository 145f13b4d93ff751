from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import demand, demand_choice, operator, widened

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
MOST_EXPERTS, MOST_CHOICES = 1024, 32
# Keeps a sum of scores that are all zero from dividing zero.
LEAST = 1e-20


class Routing(NamedTuple):
    """The experts of each token and their weights; statistics are (0,) if they were not requested. `weights`, `scores`
    and `z` have gradients."""

    weights: Tensor
    experts: Tensor
    tokens: Tensor
    scores: Tensor
    z: Tensor


@operator(constants=("bias", "token_weight"), choices={"score": SCORES})
def moe_router(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    score: str = "softmax",
    experts: Tensor | None = None,
    *,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    statistics: bool = False,
) -> Routing:
    """Chooses `top_k` experts for each token of a mixture of experts.

    logits: (..., n), bias: (n,) in any floating dtype, token_weight: (...) in any floating dtype, experts: (..., k)
    indices -> weights (..., top_k) in fp32, experts (..., top_k) in int64, and the statistics in fp32.

    The scores are the softmax or the sigmoids of the logits, or ``sqrt(softplus(logits))``, which is rounded to the
    logits' dtype after both steps, as in DeepSeek-V4. The experts with the largest ``score + bias`` are chosen, the
    largest first; of equal ones the first. `experts` gives the choice instead, k = top_k. With `groups`, they come from the `top_groups` groups whose two best
    experts have the largest sums. The weights are the scores of the chosen experts in fp32, divided by their sum if
    `normalize`, times `scale`.

    With `statistics`, over all tokens, each counted `token_weight` times: `tokens`, (n,), counts the tokens of each
    expert; `scores`, (n,), sums the scores; `z`, a scalar, sums ``logsumexp(logits) ** 2``. For N tokens,
    ``n * (tokens / N * scores / N).sum()`` is the load-balancing loss of Switch Transformers, and ``z / N`` the z-loss.

    There are at most 1024 experts, and `top_k` is at most 32. `groups` divides the experts. With `experts`, there are
    neither `bias` nor `groups`; one outside of [0, n) is an error on CPU, and has the weight 0 and the index -1 on CUDA.

    Cost: forward moves |logits| + 12 top_k bytes per token, backward twice |logits| and the same 12 top_k bytes.
    Backward needs the logits, the experts and `token_weight`, and computes the scores again.

    >>> moe_router(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 2)[:2]
    (tensor([[0.5000, 0.5000]]), tensor([[1, 3]]))
    """
    n = logits.shape[-1]
    demand(n <= MOST_EXPERTS, "moe_router", "logits", f"have at most {MOST_EXPERTS} experts", n)
    demand_choice("moe_router", "score", SCORES, score)
    demand(math.isfinite(scale), "moe_router", "scale", "be finite", scale)
    demand(groups >= 1 and n % groups == 0, "moe_router", "groups", f"divide the {n} experts", groups)
    demand(1 <= top_groups <= groups, "moe_router", "top_groups", f"lie in [1, {groups}]", top_groups)
    most = min(n // groups * top_groups, MOST_CHOICES)
    demand(1 <= top_k <= most, "moe_router", "top_k", f"lie in [1, {most}]", top_k)
    x = widened(logits)
    if score == "sqrtsoftplus":
        scores = functional.softplus(x).to(logits.dtype).to(x.dtype).sqrt().to(logits.dtype).to(x.dtype)
    else:
        scores = x.softmax(-1) if score == "softmax" else x.sigmoid()
    # Logits have the order of their scores, without ties from rounding. Rounded scores decide.
    by_logits = bias is None and groups == 1 and score != "sqrtsoftplus"
    by = x if by_logits else scores if bias is None else scores + bias
    by = by.detach().masked_fill(by.isnan(), math.inf)
    if groups > 1:
        of_group = by.unflatten(-1, (groups, n // groups))
        best = of_group.topk(min(2, n // groups), -1).values.sum(-1)
        rank = best.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
        by = of_group.masked_fill((rank >= top_groups).unsqueeze(-1), -math.inf).flatten(-2)
    index = by.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    if experts is not None:
        demand(experts.shape == index.shape, "moe_router", "experts", f"have shape {[*index.shape]}", [*experts.shape])
        demand(bias is None, "moe_router", "bias", "be None, because experts are given", "a tensor")
        demand(groups == 1, "moe_router", "groups", "be 1, because experts are given", groups)
        index = experts.long()
    weights = scores.gather(-1, index)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST)
    weights = weights * scale
    if not statistics:
        return Routing(weights, index, *(x.new_empty(0) for _ in range(3)))
    count = x.new_ones(logits.shape[:-1]) if token_weight is None else token_weight.to(x.dtype)
    chosen = torch.zeros_like(x).scatter_add(-1, index, torch.ones_like(weights))
    rows = tuple(range(logits.dim() - 1))

    def total(t: Tensor) -> Tensor:
        return t.sum(rows) if rows else t

    tokens, sums = total(chosen * count.unsqueeze(-1)), total(scores * count.unsqueeze(-1))
    return Routing(weights, index, tokens.detach(), sums, (x.logsumexp(-1).square() * count).sum())
