"""Distillation losses agree with their formulas on whole logits, in fp64."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as TF
from post_training import (
    BUDGET,
    CLASSES,
    MANY_CLASSES,
    TOKENS,
    Model,
    agree,
    all_log_probs,
    assert_no_logits,
    model,
    of_ids,
    targets,
)

from liger_ops import losses

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


def test_half_precision_gives_fp32_losses():
    m, teacher = (Model(*(t.detach().bfloat16().requires_grad_() for t in x)) for x in pair())
    target = targets(N)
    for loss in (losses.distillation_loss, losses.cosine_distillation_loss):
        found, _ = loss(
            m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias, hard_weight=1.0
        )
        found.backward()
        assert found.dtype == torch.float32 and m.weight.grad.dtype == torch.bfloat16 and teacher.weight.grad is None


def test_gradcheck():
    m, teacher, target = model(6, classes=5, width=4), model(6, classes=5, width=3, frozen=True), targets(6, classes=5)
    logs, ids = all_log_probs(teacher).topk(2, -1)
    whole = teacher.hidden, teacher.weight, target
    for loss in (
        lambda x, w, b: losses.distillation_loss(x, w, *whole, b, beta=0.4, hard_weight=0.5)[0],
        lambda x, w, b: losses.cosine_distillation_loss(x, w, *whole, b, hard_weight=0.5)[0],
        lambda x, w, b: losses.topk_distillation_loss(x, w, ids, logs, target, b, beta=0.4, hard_weight=0.5)[0],
    ):
        assert torch.autograd.gradcheck(loss, tuple(m))


def test_no_tensor_of_tokens_times_classes():
    teacher = [t.float() for t in model(TOKENS, classes=MANY_CLASSES, width=12, frozen=True)]
    target, ids = targets(TOKENS, classes=MANY_CLASSES), torch.arange(K).expand(TOKENS, K)
    logs = torch.full((TOKENS, K), -2.0)
    options = dict(hard_weight=0.5, memory_budget=BUDGET)
    for loss in (losses.distillation_loss, losses.cosine_distillation_loss):
        assert_no_logits(lambda m, f=loss: f(m.hidden, m.weight, *teacher[:2], target, m.bias, **options)[0], TOKENS)
    assert_no_logits(
        lambda m: losses.topk_distillation_loss(m.hidden, m.weight, ids, logs, target, m.bias, **options)[0], TOKENS
    )


def test_errors():
    m, teacher = pair()
    call = m.hidden, m.weight, teacher.hidden
    with pytest.raises(ValueError, match="distillation_loss: target must be given with hard_weight"):
        losses.distillation_loss(*call, teacher.weight, hard_weight=1.0)
    for loss in (losses.distillation_loss, losses.cosine_distillation_loss):
        with pytest.raises(
            (ValueError, RuntimeError), match="teacher_weight must have 37 rows|t_weight must have 37 classes"
        ):
            loss(*call, teacher.weight[:-1], targets(N))
    for beta in (-0.1, 1.5):
        with pytest.raises((ValueError, RuntimeError), match="beta must be"):
            losses.distillation_loss(*call, teacher.weight, beta=beta)
    ids, logs = top(teacher)
    with pytest.raises(ValueError, match=r"topk_distillation_loss: mask must have shape \[23\] \(got \[1\]\)"):
        losses.topk_distillation_loss(m.hidden, m.weight, ids, logs, mask=torch.ones(1))
    with pytest.raises(ValueError, match=r"distillation_loss: mask must have shape \[23\] \(got \[1, 23\]\)"):
        losses.distillation_loss(*call, teacher.weight, mask=torch.ones(1, N))
    with pytest.raises(ValueError, match=r"teacher_ids must have shape \[23, 'K'\] \(got \[22, 5\]\)"):
        losses.topk_distillation_loss(m.hidden, m.weight, ids[1:], logs)
    with pytest.raises(ValueError, match=r"teacher_log_probs must have shape \[23, 5\] \(got \[23, 4\]\)"):
        losses.topk_distillation_loss(m.hidden, m.weight, ids, logs[:, 1:])
    with pytest.raises(ValueError, match="topk_distillation_loss: beta must be between 0 and 1 .got 1.5"):
        losses.topk_distillation_loss(m.hidden, m.weight, ids, logs, beta=1.5)
