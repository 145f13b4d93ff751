"""`liger_kernel.chunked_loss`: losses of preferences, and the names of all losses.

`compiled` and `chunk_size` are ignored: the operators choose their chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import losses
from . import forms
from .chunked_distillation import LigerFusedLinearCosineSimilarityFunction, LigerFusedLinearJSDFunction
from .chunked_policy import LigerFusedLinearGRPOFunction, LossAndMetrics

autograd_function, layer = partial(forms.autograd_function, __name__), partial(forms.layer, __name__)


@torch.no_grad()
def sums_of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum of all logits of each sequence, (B, S, n) -> (B,). Logits are linear: none is computed."""
    sums = hidden.sum(1, dtype=torch.float32) @ weight.sum(0, dtype=torch.float32)
    return sums if bias is None else sums + hidden.shape[1] * bias.sum(dtype=torch.float32)


# ---- Preference pairs


def preference(loss: Any, *aux: str) -> Callable[..., LossAndMetrics]:
    """A loss with the package's five metrics, the rewards, and metrics of the loss by name."""

    def of_pairs(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, compute_nll_loss: bool,
        alpha: float = 1.0, **options: Any,
    ) -> LossAndMetrics:  # fmt: skip
        found, m = loss(input, weight, target, bias, nll_weight=alpha if compute_nll_loss else 0.0, **options)
        pairs = len(target) // 2
        logits = sums_of_logits(input, weight, bias) / (pairs * input.shape[1] * len(weight))
        nll = m["nll"] if compute_nll_loss else torch.zeros_like(m["nll"])
        means = logits[:pairs].sum(), logits[pairs:].sum()
        names = "chosen_rewards", "rejected_rewards", *aux
        return found, (m["chosen_log_probs"], m["rejected_log_probs"], *means, nll, *(m[name] for name in names))

    return of_pairs


orpo = preference(losses.orpo_loss, "log_odds_ratio", "log_odds_chosen")
cpo = preference(losses.cpo_loss)
simpo = preference(losses.simpo_loss)

DPO_TYPES = {
    "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
}  # fmt: skip


def check_dpo_type(loss_type: str, label_smoothing: float) -> None:
    if loss_type not in DPO_TYPES:
        raise ValueError(f"Unsupported loss_type: {loss_type}. Supported types are: {DPO_TYPES}")
    if loss_type == "exo_pair" and label_smoothing <= 0:
        raise ValueError(f"label_smoothing must be > 0 for loss_type='exo_pair' (got {label_smoothing})")
    if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must be at least 0 and below 0.5 for loss_type='robust' (got {label_smoothing})"
        )


def reference(use_ref_model: bool, ref_input: Any, ref_weight: Any, ref_bias: Any) -> dict[str, Any]:
    return dict(ref_hidden=ref_input, ref_weight=ref_weight, ref_bias=ref_bias) if use_ref_model else {}


def dpo(
    *, loss_type: str, label_smoothing: float, use_ref_model: bool, ref_input: Tensor | None,
    ref_weight: Tensor | None, ref_bias: Tensor | None, **arguments: Any,
) -> LossAndMetrics:  # fmt: skip
    check_dpo_type(loss_type, label_smoothing)
    arguments |= reference(use_ref_model, ref_input, ref_weight, ref_bias)
    # The package ignores label_smoothing in the other types.
    arguments.update(label_smoothing=label_smoothing if loss_type in ("exo_pair", "robust") else 0.0)
    return preference(losses.dpo_loss)(loss_type=loss_type, **arguments)


# ---- KTO


def kto(
    input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor | None, bias: Tensor | None, *,
    ref_input: Tensor | None, ref_weight: Tensor | None, ref_bias: Tensor | None, use_ref_model: bool, **options: Any,
) -> LossAndMetrics:  # fmt: skip
    """A `kl` with one value per sequence belongs to its sequence. In the package that needs a `chunk_size` as large as
    the batch; smaller chunks add up the losses of all pairs of a sequence and a value."""
    if preference_labels is None:
        raise TypeError("LigerFusedLinearKTOLoss: preference_labels must be given (got None)")
    options |= reference(use_ref_model, ref_input, ref_weight, ref_bias)
    loss, m = losses.kto_loss(input, weight, target, preference_labels, bias, **options)

    def by_label(t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(preference_labels, t, 0).sum(), torch.where(preference_labels, 0, t).sum()

    of_sequences = m["log_probs"], sums_of_logits(input, weight, bias), m["rewards"]
    return loss, tuple(total for t in of_sequences for total in by_label(t))


# ---- The package's names

LigerFusedLinearORPOFunction = autograd_function("LigerFusedLinearORPOFunction", orpo)
LigerFusedLinearCPOFunction = autograd_function("LigerFusedLinearCPOFunction", cpo)
LigerFusedLinearSimPOFunction = autograd_function("LigerFusedLinearSimPOFunction", simpo)
LigerFusedLinearDPOFunction = autograd_function("LigerFusedLinearDPOFunction", dpo)
LigerFusedLinearKTOFunction = autograd_function("LigerFusedLinearKTOFunction", kto)

LigerFusedLinearORPOLoss = layer("LigerFusedLinearORPOLoss", orpo)
LigerFusedLinearCPOLoss = layer("LigerFusedLinearCPOLoss", cpo)
LigerFusedLinearSimPOLoss = layer("LigerFusedLinearSimPOLoss", simpo)
LigerFusedLinearDPOLoss = layer(
    "LigerFusedLinearDPOLoss", dpo, lambda loss: check_dpo_type(loss.loss_type, loss.label_smoothing)
)
LigerFusedLinearKTOLoss = layer("LigerFusedLinearKTOLoss", kto)

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
    **{f"fused_linear_{kind}": [f"LigerFusedLinear{base}Base"]
       for kind, base in (("distillation", "Distillation"), ("ppo", "PPO"), ("preference", "Preference"),
                          ("unpaired_preference", "UnpairedPreference"))},
    "functional": [f"liger_fused_linear_{kind}"
                   for kind in ("cosine", "cpo", "dpo", "grpo", "jsd", "kto", "orpo", "simpo")],
}  # fmt: skip
CHUNKED_LOSS["grpo_loss"] += ["clip_coef_fn", "get_gamma_weights", "k3_loss_fn", "sapo_loss_fn"]
