"""Preference losses agree with their formulas on whole logits, in fp64."""

import pytest
import torch

from liger_ops import losses
from tests.support.families.post_training import (
    B,
    S,
    agree,
    all_log_probs,
    model,
    of_ids,
    targets,
)  # fmt: skip


def sequences(m, target, average, **head):
    """(B,) of the chosen and of the rejected."""
    total = of_ids(all_log_probs(m, **head), target).sum(-1)
    total = total / (target != -100).sum(-1) if average else total
    return total.chunk(2)


def nll(m, target):
    half = len(target) // 2
    ids = target[:half]
    return -of_ids(all_log_probs(m)[:half], ids).sum() / (ids != -100).sum()


def sigma(x):
    return 1 / (1 + torch.exp(-x))


EPS, TAU, BETA = 0.1, 0.05, 0.3
# Of chosen and rejected log-ratios.
FORMULAS = {
    "sigmoid": lambda c, r: -(1 - EPS) * sigma(BETA * (c - r)).log() - EPS * sigma(BETA * (r - c)).log(),
    "robust": lambda c, r: (
        (EPS * sigma(BETA * (r - c)).log() - (1 - EPS) * sigma(BETA * (c - r)).log()) / (1 - 2 * EPS)
    ),
    "hinge": lambda c, r: (1 - BETA * (c - r)).clamp(min=0),
    "ipo": lambda c, r: (c - r - 0.5 / BETA) ** 2,
    "exo_pair": lambda c, r: (
        sigma(BETA * (c - r)) * (sigma(BETA * (c - r)) / (1 - EPS)).log()
        + sigma(BETA * (r - c)) * (sigma(BETA * (r - c)) / EPS).log()
    ),
    "nca_pair": lambda c, r: -sigma(BETA * c).log() - 0.5 * sigma(-BETA * c).log() - 0.5 * sigma(-BETA * r).log(),
    "bco_pair": lambda c, r: -sigma(BETA * c).log() - sigma(-BETA * r).log(),
    "sppo_hard": lambda c, r: (c - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
    "apo_zero": lambda c, r: 1 - sigma(BETA * c) + sigma(BETA * r),
    "apo_down": lambda c, r: sigma(BETA * c) + 1 - sigma(BETA * (c - r)),
    "discopop": lambda c, r: (
        -sigma(BETA * (c - r)).log() * (1 - sigma(BETA * (c - r) / TAU))
        + torch.exp(-BETA * (c - r)) * sigma(BETA * (c - r) / TAU)
    ),
}


@pytest.mark.parametrize("reference", ["none", "given", "hidden"])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("loss_type", FORMULAS)
def test_dpo(loss_type, average, reference):
    m, ref, target = model(B, S), model(B, S, width=12, frozen=True), targets(B, S)
    ratios = torch.cat(sequences(ref, target, average))
    smoothing = EPS if loss_type in ("sigmoid", "robust", "exo_pair") else 0.0
    options = dict(
        loss_type=loss_type, beta=BETA, label_smoothing=smoothing, discopop_tau=TAU, average_log_prob=average
    )
    if reference == "hidden":
        options |= dict(ref_hidden=ref.hidden, ref_weight=ref.weight, ref_bias=ref.bias)
    elif reference == "given":
        options |= dict(ref_log_probs=ratios)
    else:
        ratios = ratios * 0

    def formula(m):
        chosen, rejected = (p - q for p, q in zip(sequences(m, target, average), ratios.chunk(2)))
        return FORMULAS[loss_type](chosen, rejected).mean()

    agree(lambda m: losses.dpo_loss(m.hidden, m.weight, target, m.bias, **options)[0], formula, m)


@pytest.mark.parametrize("other", [False, True])
def test_dpo_with_nll(other):
    m, target, nll_target = model(B, S), targets(B, S), targets(B, S)

    def formula(m):
        chosen, rejected = sequences(m, target, False)
        return -sigma(0.1 * (chosen - rejected)).log().mean() + 0.6 * nll(m, nll_target if other else target)

    options = dict(nll_weight=0.6, nll_target=nll_target if other else None)
    agree(lambda m: losses.dpo_loss(m.hidden, m.weight, target, m.bias, **options)[0], formula, m)


@pytest.mark.parametrize("smoothing", [0.0, EPS])
@pytest.mark.parametrize("average", [False, True])
def test_cpo(average, smoothing):
    m, target = model(B, S, bias=False), targets(B, S)

    def formula(m):
        chosen, rejected = sequences(m, target, average)
        margin = BETA * (chosen - rejected)
        losses = -(1 - smoothing) * sigma(margin).log() - smoothing * sigma(-margin).log()
        return losses.mean() + 0.8 * nll(m, target)

    options = dict(beta=BETA, label_smoothing=smoothing, average_log_prob=average, nll_weight=0.8)
    agree(lambda m: losses.cpo_loss(m.hidden, m.weight, target, m.bias, **options)[0], formula, m)


def test_simpo():
    m, target = model(B, S), targets(B, S)

    def formula(m):
        chosen, rejected = sequences(m, target, True)
        return -sigma(2.5 * (chosen - rejected) - 0.4).log().mean()

    agree(lambda m: losses.simpo_loss(m.hidden, m.weight, target, m.bias, beta=2.5, gamma=0.4)[0], formula, m)


@pytest.mark.parametrize("other", [False, True])
def test_orpo(other):
    m, target, nll_target = model(B, S), targets(B, S), targets(B, S)

    def formula(m):
        chosen, rejected = (log_prob.exp() for log_prob in sequences(m, target, True))
        odds = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
        return nll(m, nll_target if other else target) - BETA * sigma(odds.log()).log().mean()

    options = dict(beta=BETA, nll_target=nll_target if other else None)
    agree(lambda m: losses.orpo_loss(m.hidden, m.weight, target, m.bias, **options)[0], formula, m)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("kl", [None, torch.tensor(0.2), torch.linspace(-0.3, 0.4, B)])
def test_kto(kl, reference):
    m, ref, target = model(B, S), model(B, S, frozen=True), targets(B, S)
    desirable = torch.tensor([True, False, False, True])
    options = dict(ref_hidden=ref.hidden, ref_weight=ref.weight, ref_bias=ref.bias) if reference else {}
    options |= dict(beta=BETA, kl=kl, desirable_weight=1.5, undesirable_weight=0.5)

    def formula(m):
        ratio = of_ids(all_log_probs(m), target).sum(-1)
        ratio = ratio - of_ids(all_log_probs(ref), target).sum(-1) if reference else ratio
        ratio = ratio - (0 if kl is None else kl)
        return torch.where(desirable, 1.5 * (1 - sigma(BETA * ratio)), 0.5 * (1 - sigma(-BETA * ratio))).mean()

    agree(lambda m: losses.kto_loss(m.hidden, m.weight, target, desirable, m.bias, **options)[0], formula, m)


def test_options_of_the_projection():
    m, ref, target = model(B, S), model(B, S, frozen=True), targets(B, S)
    head = dict(temperature=0.7, softcap=4.0)

    def formula(m):
        ratios = [sequences(x, target, False, scale=0.5, **head) for x in (m, ref)]
        (chosen, rejected), (ref_chosen, ref_rejected) = ratios
        return -sigma(0.1 * (chosen - ref_chosen - rejected + ref_rejected)).log().mean()

    reference = dict(ref_hidden=ref.hidden, ref_weight=ref.weight, ref_bias=ref.bias)
    options = dict(logits_scale=0.5, **reference, **head)
    agree(lambda m: losses.dpo_loss(m.hidden, m.weight, target, m.bias, **options)[0], formula, m)


def test_metrics_are_detached():
    m, target = model(B, S), targets(B, S)
    for loss in (losses.dpo_loss, losses.cpo_loss, losses.simpo_loss, losses.orpo_loss):
        found, metrics = loss(m.hidden, m.weight, target, m.bias)
        assert found.requires_grad and not any(t.requires_grad for t in metrics.values())
        chosen, rejected = sequences(m, target, loss in (losses.simpo_loss, losses.orpo_loss))
        torch.testing.assert_close(metrics["chosen_log_probs"], chosen.detach())
        torch.testing.assert_close(metrics["rejected_log_probs"], rejected.detach())
        torch.testing.assert_close(metrics["nll"], nll(m, target).detach())
        beta = {losses.simpo_loss: 2.0}.get(loss, 0.1)
        torch.testing.assert_close(metrics["chosen_rewards"], beta * chosen.detach())
    _, metrics = losses.kto_loss(m.hidden, m.weight, target, torch.tensor([True] * B), m.bias)
    assert set(metrics) == {"log_probs", "rewards"} and not metrics["rewards"].requires_grad
