"""Distillation losses agree with their formulas on whole logits, in fp64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as TF

from liger_ops import losses
from tests.support.families.post_training import (
    CLASSES,
    Model,
    agree,
    all_log_probs,
    model,
    of_ids,
    targets,
)

N = 23


def kl(p, q):
    return torch.where(p == 0, 0, p * (p.log() - q.log())).sum(-1)


def divergence(student, teacher, beta):
    """Of probabilities (..., V)."""
    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = (1 - beta) * student + beta * teacher
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def cross_entropy(m, target):
    return -of_ids(all_log_probs(m), target)


def pair():
    return model(N), model(N, width=12, frozen=True)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("hard", [0.0, 0.7])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation(beta, hard, temperature):
    (m, teacher), target = pair(), targets(N)
    counted = target != -100

    def formula(m):
        student, of_teacher = (all_log_probs(x, temperature).exp() for x in (m, teacher))
        losses = 0.4 * divergence(student, of_teacher, beta) + hard * cross_entropy(m, target)
        return losses[counted].mean()

    def ours(m):
        return losses.distillation_loss(
            m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias, beta=beta,
            temperature=temperature, soft_weight=0.4, hard_weight=hard,
        )[0]  # fmt: skip

    agree(ours, formula, m)


def test_masks_counts_and_projections():
    m, teacher = pair()
    mask, target = torch.arange(N) % 3 > 0, targets(N)

    def formula(m):
        student, of_teacher = (
            all_log_probs(x, scale=s, softcap=c).exp() for x, s, c in ((m, 0.5, 4.0), (teacher, 2.0, 6.0))
        )
        logs = all_log_probs(m, scale=0.5, softcap=4.0)
        return (divergence(student, of_teacher, 0.5)[mask].sum() - of_ids(logs, target)[mask].sum()) / 50

    for items in (50, torch.tensor(50)):
        agree(
            lambda m, items=items: losses.distillation_loss(
                m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias, beta=0.5, mask=mask,
                num_items_in_batch=items, hard_weight=1.0, logits_scale=0.5, softcap=4.0, teacher_logits_scale=2.0,
                teacher_softcap=6.0,
            )[0],
            formula,
            m,
        )  # fmt: skip


def test_a_student_with_a_subset_of_the_classes():
    m, teacher = pair()
    target, kept = targets(N), torch.randperm(teacher.weight.shape[0])[: CLASSES // 2]
    student = Model(m.hidden, m.weight[: len(kept)].detach().requires_grad_(), None)
    hard = torch.where(target < len(kept), target, -100)
    counted = hard != -100

    def formula(m):
        of_teacher = all_log_probs(teacher)[:, kept]
        losses = (of_teacher.exp() * (of_teacher - all_log_probs(m))).sum(-1) + cross_entropy(m, hard)
        return losses[counted].mean()

    def ours(m):
        return losses.distillation_loss(
            m.hidden, m.weight, teacher.hidden, teacher.weight, hard, None, teacher.bias, hard_weight=1.0,
            vocab_map=kept,
        )[0]  # fmt: skip

    agree(ours, formula, student)


def test_metrics_are_unweighted_means():
    (m, teacher), target = pair(), targets(N)
    counted = target != -100
    call = m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias
    _, metrics = losses.distillation_loss(*call, soft_weight=0.3, hard_weight=0.6)
    student, of_teacher = (all_log_probs(x).exp().detach() for x in (m, teacher))
    expected = {"soft": kl(of_teacher, student), "hard": cross_entropy(m, target).detach(),
                "student_entropy": -(student * student.log()).sum(-1)}  # fmt: skip
    assert set(metrics) == set(expected) and not any(t.requires_grad for t in metrics.values())
    for name, values in expected.items():
        torch.testing.assert_close(metrics[name], values[counted].mean())


def test_nothing_counts():
    m, teacher = pair()
    target = torch.full((N,), -100)
    for loss in (losses.distillation_loss, losses.cosine_distillation_loss):
        found, _ = loss(
            m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias, hard_weight=1.0
        )
        assert found == 0 and not torch.autograd.grad(found, m.weight)[0].any()


# ---- Teachers of few classes

K = 5


def top(teacher, temperature=1.0, missing=False):
    logs, ids = all_log_probs(teacher, temperature).topk(K, -1)
    if missing:
        ids[::4, 2:], logs[::4, 2:] = -100, math.nan
    return ids, logs


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_topk_teachers(beta, tail, missing):
    (m, teacher), target = pair(), targets(N)
    for temperature, hard in itertools.product((1.0, 2.0), (0.0, 0.7)):
        ids, logs = top(teacher, temperature, missing)
        counted, known = target != -100, ids != -100

        def formula(m, temperature=temperature, hard=hard, ids=ids, logs=logs, known=known):
            p = torch.where(known, logs.exp(), 0)
            q = torch.where(known, all_log_probs(m, temperature).gather(-1, ids.clamp(min=0)).exp(), 0)
            if tail:
                p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
            # An unknown class is in neither distribution: any equal number gives 0.
            p, q = (torch.where(torch.cat([known, known[:, :1] | True], -1)[:, : x.shape[-1]], x, 1) for x in (p, q))
            return (0.4 * divergence(q, p, beta) + hard * cross_entropy(m, target))[counted].mean()

        def ours(m, temperature=temperature, hard=hard, ids=ids, logs=logs):
            return losses.topk_distillation_loss(
                m.hidden, m.weight, ids, logs, target, m.bias, beta=beta, tail=tail, temperature=temperature,
                soft_weight=0.4, hard_weight=hard,
            )[0]  # fmt: skip

        agree(ours, formula, m)


def test_all_classes_make_the_whole_divergence():
    m, teacher = pair()
    logs, ids = all_log_probs(teacher).topk(CLASSES, -1)
    for beta in (0.0, 0.5, 1.0):
        whole, _ = losses.distillation_loss(
            m.hidden, m.weight, teacher.hidden, teacher.weight, None, m.bias, teacher.bias, beta=beta
        )
        found, _ = losses.topk_distillation_loss(m.hidden, m.weight, ids, logs, None, m.bias, beta=beta)
        torch.testing.assert_close(found, whole)


def test_one_projection_serves_hard_and_soft(monkeypatch):
    from liger_ops import functional as F

    (m, teacher), target = pair(), targets(N)
    calls = []
    for name in ("fused_linear_log_probs", "fused_linear_cross_entropy"):
        op = getattr(F, name)
        monkeypatch.setattr(F, name, lambda *a, op=op, name=name, **k: calls.append(name) or op(*a, **k))
    ids, logs = top(teacher)
    losses.topk_distillation_loss(m.hidden, m.weight, ids, logs, target, m.bias, hard_weight=1.0)
    assert calls == ["fused_linear_log_probs"]


# ---- Cosine similarity, stored distributions


@pytest.mark.parametrize("hard", [0.0, 0.7])
def test_cosine(hard):
    (m, teacher), target = pair(), targets(N)

    def formula(m):
        student, of_teacher = (TF.linear(x.hidden, x.weight, x.bias) for x in (m, teacher))
        angle = (student * of_teacher).sum(-1) / student.norm(dim=-1) / of_teacher.norm(dim=-1)
        return (0.4 * (1 - angle) + hard * cross_entropy(m, target))[target != -100].mean()

    for budget in (None, 7 * 16 * CLASSES):
        agree(lambda m, budget=budget: losses.cosine_distillation_loss(
            m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias, soft_weight=0.4,
            hard_weight=hard, memory_budget=budget)[0], formula, m)  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
def test_target_distributions(masked):
    m, mask = model(4, 6), torch.rand(4, 6) < 0.7 if masked else None
    p = torch.rand(4, 6, CLASSES).double().masked_fill(torch.rand(4, 6, CLASSES) < 0.2, 0)
    p = p / p.sum(-1, keepdim=True)
    weights = torch.randn(4, 6).double()

    def formula(m):
        found = kl(p, all_log_probs(m, 2.0).exp())
        return ((found if mask is None else found.masked_fill(~mask, 0)) * weights).sum()

    def ours(m):
        found = losses.target_distribution_loss(m.hidden, m.weight, p, m.bias, temperature=2.0, mask=mask)
        return (found * weights).sum()

    agree(ours, formula, m)
