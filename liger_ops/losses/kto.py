"""Kahneman-Tversky optimization: sequences labelled as desirable or not, without pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from ._sequences import (
    NOT_NEGATIVE,
    POSITIVE,
    Metrics,
    check,
    check_numbers,
    check_shape,
    detached,
    of_sequences,
    reference_of_sequences,
)


def kto_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    desirable: Tensor,
    bias: Tensor | None = None,
    *,
    ref_log_probs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    kl: Tensor | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    average_log_prob: bool = False,
    ignore_index: int = -100,
    **head: Any,
) -> tuple[Tensor, Metrics]:
    """The mean over sequences of ``1 - sigmoid(beta * (log-ratio - kl))``, with the other sign for undesirable ones.

    hidden: (B, S, n), weight: (V, n), target: (B, S), desirable: (B,) bool, bias: (V,). The reference is as in
    :func:`dpo_loss`, with B sequences. kl: a scalar, (1,) or (B,), the estimated KL divergence of policy and reference;
    it takes no gradient.
    """
    check_numbers("kto_loss", POSITIVE, beta=beta)
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    check_numbers("kto_loss", NOT_NEGATIVE, **weights)
    check(target.dim() == 2, "kto_loss", "target", "have shape (B, S)", list(target.shape))
    rule = f"be bool of shape [{len(target)}]"
    fits = desirable.dtype == torch.bool and desirable.shape == target.shape[:1]
    check(fits, "kto_loss", "desirable", rule, f"{desirable.dtype} {list(desirable.shape)}")
    check_shape(kl, "kto_loss", "kl", [], [1], target.shape[:1])
    tokens = F.fused_linear_log_probs(hidden, weight, target, bias, ignore_index=ignore_index, **head).log_probs
    log_probs = of_sequences(tokens, target, average_log_prob, ignore_index)
    reference = reference_of_sequences(
        "kto_loss", target, ref_log_probs, ref_hidden, ref_weight, ref_bias, average_log_prob, ignore_index, head
    )
    ratios = log_probs if reference is None else log_probs - reference
    above = ratios if kl is None else ratios - kl.detach()
    losses = torch.where(
        desirable,
        desirable_weight * (1 - torch.sigmoid(beta * above)),
        undesirable_weight * (1 - torch.sigmoid(-beta * above)),
    )
    return losses.mean(), detached(log_probs=log_probs, rewards=beta * ratios)
