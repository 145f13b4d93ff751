"""`liger_kernel.chunked_loss` and `triton_grpo_loss`, with the package's arguments and tuples of metrics.

`compiled` and `chunk_size` are ignored: the operators choose their chunks. Where a teacher has more classes than the
student, the package gives the missing classes the logit 0 in the soft loss, and so do these functions, by rows of zeros
that are appended to a copy of the student's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import functional as F
from .. import losses

LossAndMetrics = tuple[Tensor, tuple[Tensor, ...]]


@torch.no_grad()
def sums_of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of all logits of each sequence, (B, S, n) -> (B,). Logits are linear: none is computed."""
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + hidden.shape[1] * bias.sum(dtype=torch.float32)


# ---- Preference pairs


def preference(
    loss: Any, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, compute_nll_loss: bool, alpha: float,
    *aux: str, **options: Any,
) -> LossAndMetrics:  # fmt: skip
    """The package's five metrics, and those of the loss by name."""
    found, m = loss(input, weight, target, bias, nll_weight=alpha if compute_nll_loss else 0.0, **options)
    pairs = len(target) // 2
    logits = sums_of_logits(input, weight, bias) / (pairs * input.shape[1] * len(weight))
    nll = m["nll"] if compute_nll_loss else torch.zeros_like(m["nll"])
    means = logits[:pairs].sum(), logits[pairs:].sum()
    return found, (m["chosen_log_probs"], m["rejected_log_probs"], *means, nll, *(m[name] for name in aux))


REWARDS = "chosen_rewards", "rejected_rewards"
DPO_TYPES = {
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
}  # fmt: skip


class LigerFusedLinearDPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        alpha: float = 1.0,
    ) -> LossAndMetrics:
        if loss_type not in DPO_TYPES:
            raise ValueError(f"Unsupported loss_type: {loss_type}. Supported types are: {DPO_TYPES}")
        reference: dict[str, Any] = (
            dict(ref_hidden=ref_input, ref_weight=ref_weight, ref_bias=ref_bias) if use_ref_model else {}
        )
        return preference(
            losses.dpo_loss, _input, weight, target, bias, compute_nll_loss, alpha, *REWARDS, ignore_index=ignore_index,
            beta=beta, average_log_prob=average_log_prob, loss_type=loss_type, discopop_tau=discopop_tau,
            # The package ignores it in the other types.
            label_smoothing=label_smoothing if loss_type in ("exo_pair", "robust") else 0.0, **reference,
        )  # fmt: skip


class LigerFusedLinearDPOLoss(nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
    ) -> None:
        super().__init__()
        if loss_type not in DPO_TYPES:
            raise ValueError(f"Unsupported loss_type: {loss_type}. Supported types are: {DPO_TYPES}")
        self.ignore_index, self.beta, self.alpha = ignore_index, beta, alpha
        self.compute_nll_loss, self.compiled, self.use_ref_model = compute_nll_loss, compiled, use_ref_model
        self.average_log_prob, self.chunk_size, self.loss_type = average_log_prob, chunk_size, loss_type
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> LossAndMetrics:
        return LigerFusedLinearDPOFunction.apply(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, self.ignore_index, self.beta,
            self.compute_nll_loss, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size,
            self.loss_type, self.label_smoothing, self.discopop_tau, self.alpha,
        )  # fmt: skip


class LigerFusedLinearORPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        nll_target: Tensor | None = None,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> LossAndMetrics:
        return preference(
            losses.orpo_loss, _input, weight, target, bias, compute_nll_loss, 1.0, *REWARDS, "log_odds_ratio",
            "log_odds_chosen", ignore_index=ignore_index, beta=beta, nll_target=nll_target,
        )  # fmt: skip


class LigerFusedLinearORPOLoss(nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss = ignore_index, beta, compute_nll_loss
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> LossAndMetrics:
        return LigerFusedLinearORPOFunction.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.compute_nll_loss, nll_target
        )


class LigerFusedLinearCPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> LossAndMetrics:
        return preference(
            losses.cpo_loss, _input, weight, target, bias, compute_nll_loss, alpha, *REWARDS, ignore_index=ignore_index,
            beta=beta, label_smoothing=label_smoothing, average_log_prob=average_log_prob,
        )  # fmt: skip


class LigerFusedLinearCPOLoss(nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.average_log_prob = compute_nll_loss, average_log_prob
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> LossAndMetrics:
        return LigerFusedLinearCPOFunction.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.average_log_prob,
        )  # fmt: skip


class LigerFusedLinearSimPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> LossAndMetrics:
        return preference(
            losses.simpo_loss, _input, weight, target, bias, compute_nll_loss, alpha, *REWARDS,
            ignore_index=ignore_index, beta=beta, label_smoothing=label_smoothing, gamma=gamma,
        )  # fmt: skip


class LigerFusedLinearSimPOLoss(nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.gamma = compute_nll_loss, gamma
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> LossAndMetrics:
        return LigerFusedLinearSimPOFunction.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.gamma,
        )  # fmt: skip


# ---- KTO


class LigerFusedLinearKTOFunction:
    """A `kl` with one value per sequence belongs to its sequence. In the package that needs a `chunk_size` as large as
    the batch; smaller chunks add up the losses of all pairs of a sequence and a value."""

    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        preference_labels: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> LossAndMetrics:
        reference: dict[str, Any] = (
            dict(ref_hidden=ref_input, ref_weight=ref_weight, ref_bias=ref_bias) if use_ref_model else {}
        )
        loss, m = losses.kto_loss(
            _input, weight, target, preference_labels, bias, kl=kl, beta=beta, average_log_prob=average_log_prob,
            ignore_index=ignore_index, **reference,
        )  # fmt: skip

        def by_label(t: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(preference_labels, t, 0).sum(), torch.where(preference_labels, 0, t).sum()

        of_sequences = m["log_probs"], sums_of_logits(_input, weight, bias), m["rewards"]
        return loss, tuple(total for t in of_sequences for total in by_label(t))


class LigerFusedLinearKTOLoss(nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> None:
        super().__init__()
        self.ignore_index, self.beta, self.compiled = ignore_index, beta, compiled
        self.use_ref_model, self.average_log_prob, self.chunk_size = use_ref_model, average_log_prob, chunk_size

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
    ) -> LossAndMetrics:
        if preference_labels is None:
            raise TypeError("LigerFusedLinearKTOLoss: preference_labels must be given (got None)")
        return LigerFusedLinearKTOFunction.apply(
            _input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl, self.ignore_index,
            self.beta, self.compiled, self.use_ref_model, self.average_log_prob,
        )  # fmt: skip


# ---- GRPO


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
    old, ref = (None if t is None else t.masked_fill(mask == 0, 0) for t in (old_logp, ref_logp))
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


# ---- Distillation


def padded(weight: Tensor, bias: Tensor | None, classes: int) -> tuple[Tensor, Tensor | None]:
    """The student's head with the classes of the teacher."""
    missing = classes - len(weight)
    if missing <= 0:
        return weight, bias
    return pad(weight, (0, 0, 0, missing)), None if bias is None else pad(bias, (0, missing))


def with_hard_loss(
    soft: Tensor,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weights: tuple[float, float],
    ignore_index: int,
    both: bool,
) -> Any:
    """weights: of the hard and the soft loss; both: also returns these two."""
    hard = torch.zeros_like(soft)
    if weights[0] != 0 or both:
        share = (1 / (target != ignore_index).sum().clamp(min=1)).expand(target.shape)
        hard = F.fused_linear_cross_entropy(
            input, weight, target, bias, reduction="sum", ignore_index=ignore_index, token_weight=share
        )
    loss = weights[0] * hard + weights[1] * soft
    return (loss, soft.detach(), hard.detach()) if both else loss


class LigerFusedLinearJSDFunction:
    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None,
        teacher_bias: Tensor | None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Any:
        head, of_classes = padded(student_weight, student_bias, len(teacher_weight))
        options: dict[str, Any] = dict(beta=beta, temperature=temperature, ignore_index=ignore_index)
        arguments = student_input, head, teacher_input, teacher_weight, true_labels, of_classes, teacher_bias
        weights = weight_hard_loss, weight_soft_loss
        if head is student_weight and all(weights):
            loss, m = losses.distillation_loss(*arguments, hard_weight=weights[0], soft_weight=weights[1], **options)
            return (loss, m["soft"], m["hard"]) if return_soft_hard_loss else loss
        soft, _ = losses.distillation_loss(*arguments, **options)
        return with_hard_loss(
            soft, student_input, student_weight, true_labels, student_bias, weights, ignore_index, return_soft_hard_loss
        )


class LigerFusedLinearCosineSimilarityFunction:
    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None,
        teacher_bias: Tensor | None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Any:
        """The temperature does not matter: angles do not depend on the length of the vectors."""
        head, of_classes = padded(student_weight, student_bias, len(teacher_weight))
        if head is student_weight:  # one projection serves both losses
            loss, m = losses.cosine_distillation_loss(
                student_input, head, teacher_input, teacher_weight, true_labels, of_classes, teacher_bias,
                soft_weight=weight_soft_loss * beta, hard_weight=weight_hard_loss, ignore_index=ignore_index,
            )  # fmt: skip
            return (loss, beta * m["soft"], m["hard"]) if return_soft_hard_loss else loss
        soft, _ = losses.cosine_distillation_loss(
            student_input, head, teacher_input, teacher_weight, true_labels, of_classes, teacher_bias,
            soft_weight=beta, ignore_index=ignore_index,
        )  # fmt: skip
        weights = weight_hard_loss, weight_soft_loss
        return with_hard_loss(
            soft, student_input, student_weight, true_labels, student_bias, weights, ignore_index, return_soft_hard_loss
        )


class Distillation(nn.Module):
    function: Any

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        if temperature == 0:
            raise AssertionError("Temperature cannot be 0.")
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.compiled = ignore_index, temperature, compiled
        self.chunk_size, self.return_soft_hard_loss = chunk_size, return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Any:
        return self.function.apply(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index, self.temperature, self.compiled,
            self.chunk_size, self.return_soft_hard_loss,
        )  # fmt: skip


class LigerFusedLinearJSDLoss(Distillation):
    function = LigerFusedLinearJSDFunction


class LigerFusedLinearCosineSimilarityLoss(Distillation):
    function = LigerFusedLinearCosineSimilarityFunction


liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_jsd = LigerFusedLinearJSDFunction.apply
liger_fused_linear_cosine = LigerFusedLinearCosineSimilarityFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply

# Module below `liger_kernel.chunked_loss`: names.
CHUNKED_LOSS = {
    "cosine_similarity_loss": ["LigerFusedLinearCosineSimilarityFunction", "LigerFusedLinearCosineSimilarityLoss"],
    **{f"{kind.lower()}_loss": [f"LigerFusedLinear{kind}Function", f"LigerFusedLinear{kind}Loss"]
       for kind in ("CPO", "DPO", "GRPO", "JSD", "KTO", "ORPO", "SimPO")},
    "functional": [f"liger_fused_linear_{kind}"
                   for kind in ("cosine", "cpo", "dpo", "grpo", "jsd", "kto", "orpo", "simpo")],
}  # fmt: skip
