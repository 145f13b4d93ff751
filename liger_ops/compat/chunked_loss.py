"""`liger_kernel.chunked_loss`: losses of preferences, and the names of all losses, with the package's arguments and tuples of
metrics.

`compiled` and `chunk_size` are ignored: the operators choose their chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import losses
from .chunked_distillation import (
    LigerFusedLinearCosineSimilarityFunction,
    LigerFusedLinearJSDFunction,
)
from .chunked_policy import (
    LigerFusedLinearGRPOFunction,
    LossAndMetrics,
)


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
