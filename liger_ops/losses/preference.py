"""Losses of preference pairs. The batch holds B chosen sequences, then the B rejected ones in the same order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .. import functional as F
from ._sequences import (
    NOT_NEGATIVE,
    POSITIVE,
    SMOOTHING,
    Metrics,
    check,
    check_numbers,
    detached,
    of_sequences,
    reference_of_sequences,
)


class Pairs(NamedTuple):
    chosen: Tensor  # (B,) log-probabilities
    rejected: Tensor  # (B,)
    nll: Tensor  # the mean over the chosen sequences' tokens, a scalar


def pairs_of(
    loss: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    average: bool,
    nll_target: Tensor | None,
    ignore_index: int,
    head: dict[str, Any],
) -> Pairs:
    """One projection serves the sequences' log-probabilities and the NLL."""
    check(target.dim() == 2 and target.shape[0] % 2 == 0, loss, "target", "have shape (2 B, S)", list(target.shape))
    pairs = target.shape[0] // 2
    ids, counted = target, target[:pairs] != ignore_index
    if nll_target is not None:
        # A second id per position. The NLL is one of the chosen sequences.
        counted = nll_target[:pairs] != ignore_index
        second = torch.cat([nll_target[:pairs], torch.full_like(target[pairs:], ignore_index)])
        ids = torch.stack([target, second], -1)
    found = F.fused_linear_log_probs(hidden, weight, ids, bias, ignore_index=ignore_index, **head).log_probs
    tokens, nll_tokens = (found, found) if nll_target is None else found.unbind(-1)
    chosen, rejected = of_sequences(tokens, target, average, ignore_index).split(pairs)
    return Pairs(chosen, rejected, -nll_tokens[:pairs].sum() / counted.sum())


def with_nll(loss: Tensor, pairs: Pairs, nll_weight: float) -> Tensor:
    return loss + nll_weight * pairs.nll if nll_weight else loss


# ---- DPO

DPO_TYPES = (
    "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop",
)  # fmt: skip


def dpo_losses(
    chosen: Tensor, rejected: Tensor, beta: float, loss_type: str, label_smoothing: float, discopop_tau: float
) -> Tensor:
    """chosen, rejected: (B,) log-ratios of policy and reference -> (B,)."""
    margin = beta * (chosen - rejected)
    eps = label_smoothing
    if loss_type not in ("sigmoid", "robust", "exo_pair"):
        check(eps == 0, "dpo_loss", "label_smoothing", f"be 0 with loss_type {loss_type}", eps)
    if loss_type == "sigmoid":  # with label smoothing: cDPO
        check_numbers("dpo_loss", SMOOTHING, label_smoothing=eps)
        return -(1 - eps) * logsigmoid(margin) - eps * logsigmoid(-margin)
    if loss_type == "robust":  # unbiased if a share `label_smoothing` of the labels is wrong
        check(0 <= label_smoothing < 0.5, "dpo_loss", "label_smoothing", "be in [0, 0.5) for robust", label_smoothing)
        return (eps * logsigmoid(-margin) - (1 - eps) * logsigmoid(margin)) / (1 - 2 * eps)
    if loss_type == "hinge":
        return torch.relu(1 - margin)
    if loss_type == "ipo":
        return (chosen - rejected - 1 / (2 * beta)) ** 2
    if loss_type == "exo_pair":  # KL of sigmoid(margin) from the smoothed label
        check(0 < label_smoothing < 1, "dpo_loss", "label_smoothing", "be in (0, 1) for exo_pair", label_smoothing)
        win, lose = logsigmoid(margin), logsigmoid(-margin)
        return win.exp() * (win - math.log1p(-eps)) + lose.exp() * (lose - math.log(eps))
    if loss_type == "nca_pair":
        both = logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected)
        return -logsigmoid(beta * chosen) - 0.5 * both
    if loss_type == "bco_pair":
        return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
    if loss_type == "sppo_hard":
        return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    if loss_type == "apo_zero":  # for chosen answers that are better than the policy's
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    if loss_type == "apo_down":  # for chosen answers that are worse than the policy's
        return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(margin)
    gate = torch.sigmoid(margin / discopop_tau)  # discopop
    return -logsigmoid(margin) * (1 - gate) + torch.exp(-margin) * gate


def dpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ref_log_probs: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    average_log_prob: bool = False,
    nll_weight: float = 0.0,
    nll_target: Tensor | None = None,
    ignore_index: int = -100,
    **head: Any,
) -> tuple[Tensor, Metrics]:
    """Direct preference optimization and its variants, the mean over pairs.

    hidden: (2 B, S, n), weight: (V, n), target: (2 B, S), bias: (V,). The reference is `ref_log_probs` (2 B,), or
    `ref_hidden` (2 B, S, n') and `ref_weight` (V, n'), or none: its log-probabilities are then 0, those of a uniform
    reference. `average_log_prob` takes the mean over a sequence's tokens in place of the sum; "ipo" is defined with it.
    `nll_weight` adds the chosen sequences' NLL, of `nll_target` (2 B, S) if given. `label_smoothing` is of the types
    "sigmoid", "robust" and "exo_pair".
    """
    known = f"be {', '.join(DPO_TYPES[:-1])} or {DPO_TYPES[-1]}"
    check(loss_type in DPO_TYPES, "dpo_loss", "loss_type", known, loss_type)
    check_numbers("dpo_loss", POSITIVE, beta=beta, discopop_tau=discopop_tau)
    check_numbers("dpo_loss", NOT_NEGATIVE, nll_weight=nll_weight)
    pairs = pairs_of("dpo_loss", hidden, weight, target, bias, average_log_prob, nll_target, ignore_index, head)
    reference = reference_of_sequences(
        "dpo_loss", target, ref_log_probs, ref_hidden, ref_weight, ref_bias, average_log_prob, ignore_index, head
    )
    chosen, rejected = pairs.chosen, pairs.rejected
    if reference is not None:
        ref_chosen, ref_rejected = reference.split(len(chosen))
        chosen, rejected = chosen - ref_chosen, rejected - ref_rejected
    losses = dpo_losses(chosen, rejected, beta, loss_type, label_smoothing, discopop_tau)
    metrics = detached(
        chosen_log_probs=pairs.chosen, rejected_log_probs=pairs.rejected, nll=pairs.nll, chosen_rewards=beta * chosen,
        rejected_rewards=beta * rejected,
    )  # fmt: skip
    return with_nll(losses.mean(), pairs, nll_weight), metrics


# ---- Without a reference model


def cpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
    average_log_prob: bool = False,
    nll_weight: float = 1.0,
    nll_target: Tensor | None = None,
    ignore_index: int = -100,
    **head: Any,
) -> tuple[Tensor, Metrics]:
    """Contrastive preference optimization: DPO's sigmoid loss with a uniform reference, and the chosen sequences' NLL.

    hidden: (2 B, S, n), weight: (V, n), target: (2 B, S), bias: (V,). `gamma` is the margin by which the chosen
    sequence has to lead.
    """
    return margin_loss(
        "cpo_loss", hidden, weight, target, bias, beta=beta, gamma=gamma, label_smoothing=label_smoothing,
        average_log_prob=average_log_prob, nll_weight=nll_weight, nll_target=nll_target, ignore_index=ignore_index, **head,
    )  # fmt: skip


def margin_loss(
    loss: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    beta: float,
    gamma: float,
    average_log_prob: bool,
    nll_weight: float,
    label_smoothing: float = 0.0,
    nll_target: Tensor | None = None,
    ignore_index: int = -100,
    **head: Any,
) -> tuple[Tensor, Metrics]:
    """`cpo_loss` under the name of the loss that was called."""
    check_numbers(loss, POSITIVE, beta=beta)
    check_numbers(loss, NOT_NEGATIVE, gamma=gamma, nll_weight=nll_weight)
    check_numbers(loss, SMOOTHING, label_smoothing=label_smoothing)
    pairs = pairs_of(loss, hidden, weight, target, bias, average_log_prob, nll_target, ignore_index, head)
    margin = beta * (pairs.chosen - pairs.rejected) - gamma
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    metrics = detached(
        chosen_log_probs=pairs.chosen, rejected_log_probs=pairs.rejected, nll=pairs.nll,
        chosen_rewards=beta * pairs.chosen, rejected_rewards=beta * pairs.rejected,
    )  # fmt: skip
    return with_nll(losses.mean(), pairs, nll_weight), metrics


def simpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    nll_weight: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Metrics]:
    """Simple preference optimization: :func:`cpo_loss` of mean log-probabilities with a margin."""
    return margin_loss(
        "simpo_loss", hidden, weight, target, bias, beta=beta, gamma=gamma, average_log_prob=True,
        nll_weight=nll_weight, **options,
    )  # fmt: skip


def orpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    beta: float = 0.1,
    nll_weight: float = 1.0,
    nll_target: Tensor | None = None,
    ignore_index: int = -100,
    **head: Any,
) -> tuple[Tensor, Metrics]:
    """Odds-ratio preference optimization: the chosen sequences' NLL and the odds ratio of mean log-probabilities.

    hidden: (2 B, S, n), weight: (V, n), target: (2 B, S), bias: (V,). `nll_target` (2 B, S) may also count the prompt.
    """
    check_numbers("orpo_loss", NOT_NEGATIVE, beta=beta, nll_weight=nll_weight)
    pairs = pairs_of("orpo_loss", hidden, weight, target, bias, True, nll_target, ignore_index, head)
    log_odds = pairs.chosen - pairs.rejected
    log_odds = log_odds - torch.log1p(-pairs.chosen.exp()) + torch.log1p(-pairs.rejected.exp())
    log_sigmoid = logsigmoid(log_odds)
    metrics = detached(
        chosen_log_probs=pairs.chosen, rejected_log_probs=pairs.rejected, nll=pairs.nll,
        chosen_rewards=beta * pairs.chosen, rejected_rewards=beta * pairs.rejected,
        log_odds_ratio=log_sigmoid.mean(), log_odds_chosen=log_odds.mean(),
    )  # fmt: skip
    return with_nll(-beta * log_sigmoid.mean(), pairs, nll_weight), metrics
