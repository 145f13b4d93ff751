"""Group-relative policy optimization and its variants: losses of log-probabilities, weighted by advantages."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import functional as F
from ._sequences import (
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Metrics,
    check,
    check_numbers,
    check_reference,
    check_shape,
    reference_log_probs,
)

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LOWEST, HIGHEST = math.log(1e-8), 20.0  # limits of log-ratios in VESPO's weights


class PolicyLosses(NamedTuple):
    losses: Tensor  # (B, S), or (B, 1) at the sequence level without a KL penalty
    kl: Tensor | None  # (B, S), with beta != 0
    clipped: Tensor  # bool, (B, S) or (B, 1)


def vespo_weights(
    log_ratio: Tensor, counted: Tensor, advantages: Tensor, sampler_ratio: Tensor | None, shapes: tuple[float, ...]
) -> Tensor:
    """``w^k exp(lambda (1 - w))`` of the sequences' ratios w, (B, 1). shapes: k and lambda of advantages >= 0, then of
    the others."""
    log_w = (log_ratio.clamp(-HIGHEST, HIGHEST) * counted).sum(-1, keepdim=True)
    if sampler_ratio is not None:
        log_w = log_w + sampler_ratio.log().clamp(LOWEST, HIGHEST).sum(-1, keepdim=True)
    log_w = log_w.clamp(LOWEST, HIGHEST)
    k_pos, lambda_pos, k_neg, lambda_neg = shapes
    better = (advantages >= 0).to(log_w.dtype)
    k = k_pos * better + k_neg * (1 - better)
    rate = (lambda_pos * better + lambda_neg * (1 - better)).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0).detach()


def policy_losses(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    beta: float = 0.0,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_shapes: tuple[float, ...] = (2.0, 3.0, 3.0, 2.0),
    vllm_is_ratio: Tensor | None = None,
) -> PolicyLosses:
    """The loss of each token. log_probs, mask: (B, S), advantages: (B,) or (B, S); for the options see `grpo_loss`."""
    level, smooth = importance_sampling_level, loss_type in ("cispo", "sapo", "vespo")
    check(loss_type in LOSS_TYPES, "grpo_loss", "loss_type", f"be one of {', '.join(LOSS_TYPES)}", loss_type)
    rule = f"be token{'' if smooth else ' or sequence'} with loss_type {loss_type}"
    check(level == "token" or level == "sequence" and not smooth, "grpo_loss", "importance_sampling_level", rule, level)
    check(delta is None or not smooth, "grpo_loss", "delta", f"be None with loss_type {loss_type}", delta)
    check_numbers("grpo_loss", NOT_NEGATIVE, beta=beta)
    check(beta == 0 or ref_log_probs is not None, "grpo_loss", "ref_log_probs", f"be given with beta {beta}", None)
    check_numbers("grpo_loss", SHARE, epsilon_low=epsilon_low)
    # Infinity switches the clipping off.
    check(epsilon_high >= 0, "grpo_loss", "epsilon_high", "not be negative", epsilon_high)
    temperatures = {"sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg}
    check_numbers("grpo_loss", POSITIVE, delta=delta, **temperatures)
    is_shape = len(vespo_shapes) == 4 and all(map(NOT_NEGATIVE.holds, vespo_shapes))
    check(is_shape, "grpo_loss", "vespo_shapes", "be four finite numbers that are not negative", vespo_shapes)
    rows, whole = mask.shape[:1], mask.shape
    check_shape(log_probs, "grpo_loss", "log_probs", whole)
    check_shape(advantages, "grpo_loss", "advantages", rows, whole)
    check_shape(vllm_is_ratio, "grpo_loss", "vllm_is_ratio", rows, (*rows, 1), whole)
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    sampler_ratio = vllm_is_ratio
    if sampler_ratio is not None and sampler_ratio.dim() == 1:
        sampler_ratio = sampler_ratio.unsqueeze(1)
    counted = mask.to(log_probs.dtype)

    log_ratio = log_probs - (log_probs if old_log_probs is None else old_log_probs).detach()
    if level == "sequence":
        log_ratio = (log_ratio * counted).sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
    ratio = log_ratio.exp()
    low, high = ratio < 1 - epsilon_low, ratio > 1 + epsilon_high

    if loss_type == "cispo":
        low, high = torch.zeros_like(low), ratio > epsilon_high
        losses = -ratio.clamp(max=epsilon_high).detach() * advantages * log_probs
    elif loss_type == "sapo":
        low, high = torch.zeros_like(low), torch.zeros_like(high)
        better = (advantages > 0).to(ratio.dtype)
        t = sapo_temperature_pos * better + sapo_temperature_neg * (1 - better)
        losses = -torch.sigmoid(t * (ratio - 1)) * (4 / t) * advantages
    elif loss_type == "vespo":
        low, high = torch.zeros_like(low), torch.zeros_like(high)
        weights = vespo_weights(log_ratio.detach(), counted, advantages, sampler_ratio, vespo_shapes)
        losses = -weights * advantages * log_probs
    else:
        bounded = ratio if delta is None else ratio.clamp(max=delta)
        losses = -torch.min(bounded * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    if sampler_ratio is not None and loss_type != "vespo":
        losses = losses * sampler_ratio

    kl = None
    if ref_log_probs is not None and beta != 0:
        above = ref_log_probs - log_probs
        kl = above.exp() - above - 1
        if use_bias_correction_kl:
            kl = kl * ratio
        losses = losses + beta * kl
    return PolicyLosses(losses, kl, low & (advantages < 0) | high & (advantages > 0))


def reduce_policy_losses(
    losses: Tensor,
    mask: Tensor,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """losses: (B, S) or (B, 1), mask: (B, S) -> a scalar. Variants differ in their weights of sequences and tokens."""
    check(loss_type in LOSS_TYPES, "grpo_loss", "loss_type", f"be one of {', '.join(LOSS_TYPES)}", loss_type)
    check_numbers("grpo_loss", POSITIVE, max_completion_length=max_completion_length)
    if not isinstance(num_items_in_batch, Tensor):  # whose value may be on a device
        check_numbers("grpo_loss", NOT_NEGATIVE, num_items_in_batch=num_items_in_batch)
    counted = mask.to(losses.dtype)
    tokens = losses * counted
    if loss_type in ("grpo", "sapo"):  # sequences count the same
        return (tokens.sum(-1) / counted.sum(-1).clamp(min=1)).mean()
    if loss_type == "bnpo":  # tokens count the same
        return tokens.sum() / counted.sum().clamp(min=1)
    if loss_type == "dr_grpo":  # the number of tokens does not matter
        if max_completion_length is None:
            raise ValueError("grpo_loss: max_completion_length must be given for dr_grpo (got None)")
        return tokens.sum() / (len(losses) * max_completion_length)
    if loss_type == "luspo":  # sequences count by their length
        return tokens.sum(-1).mean()
    if num_items_in_batch is None:  # dapo, cispo, vespo: tokens count the same in the whole batch
        return tokens.sum() / counted.sum().clamp(min=1)
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    share = torch.as_tensor(num_items_in_batch, dtype=losses.dtype, device=losses.device)
    return tokens.sum() / (share / (torch.distributed.get_world_size() if distributed else 1)).clamp(min=1)


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    mask: Tensor,
    advantages: Tensor,
    bias: Tensor | None = None,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    loss_type: str = "dapo",
    beta: float = 0.0,
    entropy_weight: float = 0.0,
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    memory_budget: int | None = None,
    low_rank_input: Tensor | None = None,
    low_rank_weight: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """The policy-gradient loss of sampled completions.

    hidden: (B, S, n), weight: (V, n), target, mask: (B, S), advantages: (B,) or (B, S), bias: (V,), low_rank_input:
    (B, S, r) and low_rank_weight: (V, r), of an adapter of the policy's head. `old_log_probs`
    (B, S) are those of the policy that sampled; without them, the ratio is 1 with a gradient. With `beta`, the
    penalty is the estimated KL divergence from the reference: `ref_log_probs` (B, S), or `ref_hidden` (B, S, n') and
    `ref_weight` (V, n'); without `beta` the reference has no effect. `entropy_weight` rewards entropy, at the cost of one more GEMM.

    options: `epsilon_low`, `epsilon_high` (clipping of the ratio; for "cispo" `epsilon_high` is the limit itself),
    `delta` (an upper limit of the ratio also for negative advantages), `importance_sampling_level` ("sequence" takes
    the mean of log-ratios of a sequence, GSPO), `use_bias_correction_kl` (the penalty times the ratio),
    `vllm_is_ratio` ((B,), (B, 1) or (B, S): the policy over the sampler that generated), `sapo_temperature_pos` and
    `_neg`, `vespo_shapes` (k and lambda of advantages >= 0, then of the others). `num_items_in_batch` are the tokens
    of the whole batch in all processes, for "dapo", "cispo" and "vespo".
    """
    check_shape(mask, "grpo_loss", "mask", target.shape)
    check_reference("grpo_loss", ref_log_probs, ref_hidden, ref_weight, ref_bias)
    check_numbers("grpo_loss", NOT_NEGATIVE, beta=beta)
    has_reference = ref_log_probs is not None or ref_hidden is not None
    check(beta == 0 or has_reference, "grpo_loss", "ref_log_probs or ref_hidden", f"be given with beta {beta}", None)
    check_numbers("grpo_loss", FINITE, entropy_weight=entropy_weight)
    head: dict[str, Any] = {"logits_scale": logits_scale, "softcap": softcap, "temperature": temperature,
                            "memory_budget": memory_budget, "low_rank_input": low_rank_input,
                            "low_rank_weight": low_rank_weight}  # fmt: skip
    ids = target.masked_fill(mask == 0, ignore_index)
    found = F.fused_linear_log_probs(
        hidden, weight, ids, bias, ignore_index=ignore_index, entropy=True, entropy_grad=entropy_weight != 0, **head
    )
    if beta != 0 and ref_log_probs is None:
        ref_log_probs = reference_log_probs(ids, ref_hidden, ref_weight, ref_bias, ignore_index, head)
    check_shape(old_log_probs, "grpo_loss", "old_log_probs", mask.shape)
    check_shape(ref_log_probs, "grpo_loss", "ref_log_probs", mask.shape)
    # What others hold at positions that do not count must not matter.
    old, ref = (None if t is None else t.masked_fill(mask == 0, 0) for t in (old_log_probs, ref_log_probs))
    losses, kl, clipped = policy_losses(
        found.log_probs, mask, advantages, old_log_probs=old, ref_log_probs=ref, loss_type=loss_type, beta=beta,
        **options,
    )  # fmt: skip
    if entropy_weight:
        losses = losses - entropy_weight * found.entropy
    loss = reduce_policy_losses(losses, mask, loss_type, max_completion_length, num_items_in_batch)

    def mean(t: Tensor) -> Tensor:
        return reduce_policy_losses(t.detach().to(losses.dtype), mask, "bnpo")

    metrics = {"entropy": mean(found.entropy), "clip_ratio": mean(clipped)}
    return loss, metrics if kl is None else {**metrics, "kl": mean(kl)}
