"""Preference losses agree with their formulas on whole logits, in fp64."""

import math

import pytest
import torch
from post_training import (
    BUDGET,
    CLASSES,
    MANY_CLASSES,
    TOKENS,
    B,
    Model,
    S,
    agree,
    all_log_probs,
    assert_no_logits,
    model,
    of_ids,
    targets,
)  # fmt: skip

from liger_ops import losses


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


def test_half_precision_gives_fp32_losses():
    m, target = Model(*(t.detach().bfloat16().requires_grad_() for t in model(B, S))), targets(B, S)
    loss, _ = losses.dpo_loss(m.hidden, m.weight, target, m.bias)
    loss.backward()
    assert loss.dtype == torch.float32 and m.weight.grad.dtype == torch.bfloat16


def test_gradcheck():
    m, target = model(2, 3, classes=5, width=4), targets(2, 3, classes=5)
    for loss in (losses.dpo_loss, losses.orpo_loss):
        assert torch.autograd.gradcheck(lambda *t, loss=loss: loss(t[0], t[1], target, t[2])[0], tuple(m))


def test_no_tensor_of_tokens_times_classes():
    rows = 8, TOKENS // 8
    target, desirable = targets(*rows, classes=MANY_CLASSES), torch.arange(8) < 3
    for loss in (losses.dpo_loss, losses.orpo_loss):
        assert_no_logits(lambda m, f=loss: f(m.hidden, m.weight, target, m.bias, memory_budget=BUDGET)[0], *rows)
    assert_no_logits(
        lambda m: losses.kto_loss(m.hidden, m.weight, target, desirable, m.bias, memory_budget=BUDGET)[0], *rows
    )


def test_errors():
    m, target = model(B, S), targets(B, S)
    call = m.hidden, m.weight, target, m.bias
    with pytest.raises(ValueError, match="dpo_loss: loss_type must be sigmoid, .* or discopop .got best"):
        losses.dpo_loss(*call, loss_type="best")
    with pytest.raises(ValueError, match=r"label_smoothing must be in \(0, 1\) for exo_pair \(got 0.0\)"):
        losses.dpo_loss(*call, loss_type="exo_pair")
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 0.5\) for robust \(got 0.5\)"):
        losses.dpo_loss(*call, loss_type="robust", label_smoothing=0.5)
    with pytest.raises(ValueError, match=r"cpo_loss: target must have shape \(2 B, S\) \(got \[3, 7\]\)"):
        losses.cpo_loss(m.hidden[:3], m.weight, target[:3])
    with pytest.raises(ValueError, match=r"dpo_loss: ref_log_probs must have shape \[4\] \(got \[4, 7\]\)"):
        losses.dpo_loss(*call, ref_log_probs=torch.zeros(B, S))
    with pytest.raises(ValueError, match=r"kto_loss: kl must have shape \[\] or \[1\] or \[4\] \(got \[2\]\)"):
        losses.kto_loss(m.hidden, m.weight, target, torch.ones(B) > 0, kl=torch.zeros(2))
    with pytest.raises(ValueError, match=r"kto_loss: desirable must be bool of shape \[4\]"):
        losses.kto_loss(m.hidden, m.weight, target, torch.ones(B))
    for temperature, rule in ((0.0, "positive"), (-1.0, "positive"), (math.nan, "finite")):
        with pytest.raises((ValueError, RuntimeError), match=f"temperature must be {rule}"):
            losses.dpo_loss(*call, temperature=temperature)
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        losses.dpo_loss(m.hidden, m.weight, target.clamp(min=CLASSES), m.bias)
