"""The policy losses of `liger_kernel.chunked_loss`, and `triton_grpo_loss`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from .. import losses

LossAndMetrics = tuple[Tensor, tuple[Tensor, ...]]


def items_in_batch(mask: Tensor, given: Tensor | float | None) -> Tensor | float | None:
    """Without a number of tokens, the package takes that of the masks of all processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if given is not None or not distributed:
        return given
    total = mask.sum(dtype=torch.float32)
    torch.distributed.all_reduce(total)
    return total


def masked_mean(t: Tensor, mask: Tensor) -> Tensor:
    return losses.reduce_policy_losses(t.detach().to(torch.float32), mask, "bnpo")


def own_reference(reference: Tensor | None, log_probs: Tensor, beta: float) -> Tensor | None:
    """In the package, a policy without a reference model is its own: the KL estimate is 0."""
    return log_probs.detach() if reference is None and beta != 0 else reference


class LigerFusedLinearGRPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        beta: float = 0.04,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        vllm_is_ratio: Tensor | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> LossAndMetrics:
        mask, luspo = attention_mask, loss_type == "luspo"
        # In the package's LUSPO, padding counts too, unless every sequence has a single loss.
        ids = selected_token_ids if luspo else selected_token_ids.masked_fill(mask == 0, -100)

        def log_probs_of(hidden: Tensor, head: Tensor, of_classes: Tensor | None) -> Tensor:
            return F.fused_linear_log_probs(hidden, head, ids, of_classes, temperature=temperature).log_probs

        log_probs, ref = log_probs_of(_input, weight, bias), ref_per_token_logps if use_ref_model else None
        if beta != 0 and use_ref_model and ref is None:
            if ref_input is None or ref_weight is None:
                raise AssertionError("If use_ref_model is True, ref_per_token_logps or ref_input must be provided")
            with torch.no_grad():
                ref = log_probs_of(ref_input, ref_weight, ref_bias)
        ref = own_reference(ref, log_probs, beta)
        given = old_per_token_logps, ref
        old, ref = (None if t is None else t.float() if luspo else t.float().masked_fill(mask == 0, 0) for t in given)
        per_token, kl, clipped = losses.policy_losses(
            log_probs, mask, advantages, old_log_probs=old, ref_log_probs=ref, loss_type=loss_type, beta=beta,
            epsilon_low=epsilon_low, epsilon_high=epsilon_high, importance_sampling_level=importance_sampling_level,
            delta=None if loss_type in ("cispo", "sapo", "vespo") else delta, vllm_is_ratio=vllm_is_ratio,
            use_bias_correction_kl=use_bias_correction_kl, sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
            vespo_shapes=(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        )  # fmt: skip
        if luspo:
            loss = (per_token * mask.sum(1, keepdim=True)).mean()
        else:
            items = items_in_batch(mask, num_items_in_batch)
            loss = losses.reduce_policy_losses(per_token, mask, loss_type, max_completion_length, items)
        metrics = () if kl is None else (masked_mean(kl, mask),)
        return loss, (*metrics, masked_mean(clipped, mask))


class LigerFusedLinearGRPOLoss(nn.Module):
    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        positive = {"sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg}
        for name, value in {**positive, "delta": 1.0 if delta is None else delta}.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        self.beta, self.compiled, self.use_ref_model, self.chunk_size = beta, compiled, use_ref_model, chunk_size
        self.epsilon_low, self.epsilon_high, self.loss_type = epsilon_low, epsilon_high, loss_type
        self.max_completion_length = max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.temperature, self.delta, self.use_bias_correction_kl = temperature, delta, use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> LossAndMetrics:
        return LigerFusedLinearGRPOFunction.apply(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, self.beta, self.epsilon_low, self.epsilon_high,
            self.loss_type, self.max_completion_length, self.importance_sampling_level, self.sapo_temperature_pos,
            self.sapo_temperature_neg, self.temperature, self.compiled, self.use_ref_model, self.chunk_size,
            vllm_is_ratio, self.delta, self.use_bias_correction_kl, self.vespo_k_pos, self.vespo_lambda_pos,
            self.vespo_k_neg, self.vespo_lambda_neg, num_items_in_batch,
        )  # fmt: skip


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """logits: (B, L + 1, V), input_ids, mask: (B, L) or longer, of which the end counts -> (B, L)."""
    steps = logits.shape[1] - 1
    ids = input_ids[:, input_ids.shape[1] - steps :]
    if mask is not None:
        ids = ids.masked_fill(mask[:, mask.shape[1] - steps :] == 0, -100)
    return F.log_probs(logits[:, :-1], ids, temperature).log_probs


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: Tensor | float | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Any:
    """logits: (B, L + 1, V), completion_ids: (B, L) -> the masked losses, KL estimates and clipped tokens, (B, L) each;
    with `reduce` the loss and a list of metrics. `inplace` is ignored: the logits are never overwritten."""
    mask = torch.ones_like(completion_ids) if completion_mask is None else completion_mask
    ids = completion_ids.masked_fill(mask == 0, -100)
    log_probs = F.log_probs(logits[:, :-1], ids, temperature).log_probs
    given = old_logp, own_reference(ref_logp, log_probs, beta)
    old, ref = (None if t is None else t.masked_fill(mask == 0, 0) for t in given)
    found = losses.policy_losses(
        log_probs, mask, advantages, old_log_probs=old, ref_log_probs=ref, loss_type=loss_type, beta=beta,
        epsilon_low=eps_low, epsilon_high=eps_high, importance_sampling_level=importance_sampling_level, delta=delta,
        use_bias_correction_kl=use_bias_correction_kl, sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg, vllm_is_ratio=vllm_is_ratio,
        vespo_shapes=(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
    )  # fmt: skip
    per_token, clipped = (t * mask for t in (found.losses, found.clipped.to(log_probs.dtype)))
    kl = None if found.kl is None else (found.kl * mask).detach()
    if not reduce:
        return per_token, kl, clipped
    if loss_type == "luspo":
        loss = (per_token * mask.sum(-1, keepdim=True)).mean()
    else:
        longest = mask.shape[1] if max_completion_length is None else max_completion_length
        items = items_in_batch(mask, num_items_in_batch)
        loss = losses.reduce_policy_losses(per_token, mask, loss_type, longest, items)
    return loss, [masked_mean(t, mask) for t in (kl, clipped) if t is not None]
