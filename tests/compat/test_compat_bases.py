"""liger_ops.compat: losses that other code derives from liger_kernel's base classes."""

import pytest
import torch
from torch.nn import functional as TF

from tests.support.checks import assert_most_digits
from tests.support.families.post_training import CLASSES, B, Model, S, all_log_probs, model, of_ids, targets

pytestmark = pytest.mark.usefixtures("liger_kernel_served")
N = B * S


def single(m):
    return Model(*(None if t is None else t.detach().float().requires_grad_(t.requires_grad) for t in m))


def logits(m):
    return TF.linear(m.hidden, m.weight, m.bias)


def agree(found, expected, m):
    """Losses, and their gradients with an upstream one that is not 1."""
    (loss, others), (truth, values) = found, expected
    assert_most_digits([loss, *others], [truth, *values])
    assert not any(t.requires_grad for t in others)
    wanted = [t for t in m if t is not None and t.requires_grad]
    ours, plain = (torch.autograd.grad(x, wanted, torch.tensor(0.7)) for x in (loss, truth))
    assert_most_digits(ours, plain)


# ---- Policies


def policy_class():
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    class Policy(LigerFusedLinearPPOBase):
        @staticmethod
        def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, ref_per_token_logps,
                        old_per_token_logps, beta, vllm_is_ratio, epsilon_low, loss_type, **_):  # fmt: skip
            ratio = (per_token_logps - old_per_token_logps).exp() * vllm_is_ratio
            loss = -(ratio * advantages.unsqueeze(1) - epsilon_low) * attention_mask
            penalty = beta * (per_token_logps - ref_per_token_logps).square() * attention_mask
            assert loss_type == "dapo"
            return (loss + penalty).sum() / full_attention_mask.sum(), [penalty.sum()]

        @classmethod
        def forward(cls, ctx, *tensors, **options):
            named = dict(zip(NAMES, tensors))
            return super().forward(cls=cls, ctx=ctx, compiled=False, chunk_size=2, **named, **OPTIONS)

        @staticmethod
        def backward(ctx, grad_output, *grad_metrics):
            grads = LigerFusedLinearPPOBase.backward(ctx, grad_output)
            assert len(grads) == 27
            return (*grads[:6], *[None] * (len(NAMES) - 6))

    return Policy


NAMES = ("_input", "weight", "selected_token_ids", "attention_mask", "advantages", "bias", "ref_input", "ref_weight",
         "ref_bias", "old_per_token_logps", "vllm_is_ratio")  # fmt: skip
OPTIONS = dict(use_ref_model=True, beta=0.3, epsilon_low=0.1, temperature=0.8)


@pytest.mark.parametrize("frozen", [False, True])
def test_policy(frozen):
    m, ref = single(model(B, S)), single(model(B, S, frozen=True))
    if frozen:
        m = Model(m.hidden, m.weight.detach(), m.bias.detach())
    ids, mask, advantages = torch.randint(CLASSES, (B, S)), torch.rand(B, S) < 0.7, torch.randn(B)
    old, ratio = -torch.rand(B, S) * 4, torch.rand(B) + 0.5
    found = policy_class().apply(m.hidden, m.weight, ids, mask, advantages, m.bias, *ref, old, ratio)
    logs, of_reference = (of_ids((logits(x) / 0.8).log_softmax(-1), ids) for x in (m, ref))
    loss = -((logs - old).exp() * ratio[:, None] * advantages[:, None] - 0.1) * mask
    penalty = 0.3 * (logs - of_reference).square() * mask
    agree(found, ((loss + penalty).sum() / mask.sum(), [penalty.sum().detach()]), m)


def test_parts_of_the_policy_base():
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase as Base

    m, ids = single(model(B, S)), torch.randint(CLASSES, (B, S))
    found = Base.chunk_forward(m.hidden, m.weight, ids, bias=m.bias, temperature=0.8)
    assert_most_digits([found], [of_ids((logits(m) / 0.8).log_softmax(-1), ids)])
    assert Base._compute_dapo_normalizer(torch.ones(2, 3)) == 6
    assert Base._compute_dapo_normalizer(torch.zeros(2, 3)) == 1
    assert Base._compute_dapo_normalizer(ids, 40) == Base._compute_dapo_normalizer(ids, torch.tensor(40)) == 40
    policy, arguments = policy_class(), (m.hidden, m.weight, ids, torch.ones(B, S), torch.ones(B), m.bias)
    with pytest.raises(AssertionError, match="ref_per_token_logps or ref_input"):
        policy.apply(*arguments, None, None, None, None, None)
    with pytest.raises(AssertionError, match="vllm_is_ratio must have one of the shapes"):
        policy.apply(*arguments, *m, None, torch.ones(B + 1))
    with pytest.raises(NotImplementedError, match="must define ppo_loss_fn"):
        Base.ppo_loss_fn()


# ---- Preferences


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("with_nll, other_labels", [(True, False), (True, True), (False, False)])
def test_preference(with_nll, other_labels, average):
    from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase

    options = dict(alpha=0.6, beta=0.3, compute_nll_loss=with_nll, average_log_prob=average)
    options |= dict(use_ref_model=True, gamma=0.2)

    class Preference(LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen, rejected, full_target, beta, gamma, ref_chosen_logps, ref_rejected_logps):
            margin = beta * (chosen - ref_chosen_logps - rejected + ref_rejected_logps) - gamma
            return -TF.logsigmoid(margin).sum() / (len(full_target) // 2), margin, margin.sum()

        @classmethod
        def forward(cls, ctx, x, weight, target, bias, ref_input, ref_weight, ref_bias, nll_target):
            return super().forward(cls=cls, ctx=ctx, _input=x, weight=weight, target=target, bias=bias, ref_input=ref_input,
                                   ref_weight=ref_weight, ref_bias=ref_bias, nll_target=nll_target, **options)  # fmt: skip

        @staticmethod
        def backward(ctx, *grad_output):
            grads = LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4]
            return (*grads, None, None, None, None)

    m, ref, target = single(model(B, S)), single(model(B, S, frozen=True)), targets(B, S)
    labels, pairs = targets(B, S) if other_labels else target, B // 2
    found = Preference.apply(m.hidden, m.weight, target, m.bias, *ref, labels if other_labels else None)
    sums, of_reference = (of_ids(all_log_probs(x), target).sum(-1) for x in (m, ref))
    if average:
        sums, of_reference = (t / (target != -100).sum(-1) for t in (sums, of_reference))
    margin = 0.3 * ((sums - of_reference)[:pairs] - (sums - of_reference)[pairs:]) - 0.2
    nll = TF.cross_entropy(logits(m)[:pairs].flatten(0, 1), labels[:pairs].flatten()) * with_nll
    means = [half.mean() for half in logits(m).chunk(2)]
    others = [sums[:pairs], sums[pairs:], *means, nll, margin, margin.sum()]
    agree(found, (0.6 * nll - TF.logsigmoid(margin).mean(), [t.detach() for t in others]), m)


@pytest.mark.parametrize("average", [False, True])
def test_unpaired_preference(average):
    from liger_kernel.chunked_loss.fused_linear_unpaired_preference import (
        LigerFusedLinearUnpairedPreferenceBase as Base,
    )

    class Unpaired(Base):
        @staticmethod
        def preference_loss_fn(log_prob_chunk, preference_labels_chunk, full_target, ref_log_prob_chunk, beta):
            reward = beta * (log_prob_chunk - ref_log_prob_chunk)
            signs = torch.where(preference_labels_chunk, 1, -1)
            return -TF.logsigmoid(signs * reward).sum() / len(full_target)

        @classmethod
        def forward(cls, ctx, x, weight, target, liked, bias, ref_input, ref_weight, ref_bias):
            return super().forward(cls=cls, ctx=ctx, _input=x, weight=weight, target=target, preference_labels=liked, bias=bias,
                                   ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias, use_ref_model=True,
                                   average_log_prob=average, beta=0.3)  # fmt: skip

        @staticmethod
        def backward(ctx, *grad_output):
            return (*Base.backward(ctx, grad_output)[:5], None, None, None)

    m, ref, target = single(model(B, S)), single(model(B, S, frozen=True)), targets(B, S)
    liked = torch.tensor([True, False, False, True])
    found = Unpaired.apply(m.hidden, m.weight, target, liked, m.bias, *ref)
    sums, of_reference = (of_ids(all_log_probs(x), target).sum(-1) for x in (m, ref))
    if average:
        sums, of_reference = (t / (target != -100).sum(-1) for t in (sums, of_reference))
    loss = -TF.logsigmoid(torch.where(liked, 1, -1) * 0.3 * (sums - of_reference)).mean()
    agree(found, (loss, [t[which].sum().detach() for t in (sums, logits(m)) for which in (liked, ~liked)]), m)
    with pytest.raises(AssertionError, match="preference_labels must be given"):
        Unpaired.apply(m.hidden, m.weight, target, None, m.bias, *ref)


# ---- Distillation


def distillation_class(**options):
    from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase as Base

    class Distillation(Base):
        @staticmethod
        def distillation_loss_fn(student_logits, teacher_logits, beta, target, ignore_index):
            distance = (student_logits - teacher_logits).square().sum(-1)
            return beta * torch.where(target == ignore_index, 0, distance).sum()

        @classmethod
        def forward(cls, ctx, *tensors):
            names = "student_input student_weight teacher_input teacher_weight target student_bias teacher_bias".split()
            return super().forward(cls=cls, ctx=ctx, **dict(zip(names, tensors)), **options)

        @staticmethod
        def backward(ctx, *grads_output):
            return (*Base.backward(ctx, *grads_output), None)

    return Distillation


@pytest.mark.parametrize("rows", [3, 1024])
@pytest.mark.parametrize("more", [0, 5])
def test_distillation(more, rows):
    options = dict(weight_hard_loss=0.4, weight_soft_loss=0.6, beta=0.3, temperature=2.0, chunk_size=rows)
    m, target = single(model(N)), targets(N)
    teacher = single(model(N, width=12, classes=CLASSES + more, frozen=True))
    arguments = m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias
    loss, *parts = distillation_class(**options, return_soft_hard_loss=True).apply(*arguments)
    distance = (TF.pad(logits(m) / 2, (0, more)) - logits(teacher) / 2).square().sum(-1)
    soft, hard = 0.3 * distance[target != -100].mean(), TF.cross_entropy(logits(m), target)
    agree((loss, [p.detach() for p in parts]), (0.4 * hard + 0.6 * soft, [soft.detach(), hard.detach()]), m)
    frozen = m.hidden, m.weight.detach(), *arguments[2:5], None, None
    options["weight_hard_loss"] = 0.0
    alone = distillation_class(**options).apply(*frozen)
    plain = m.hidden @ m.weight.detach().T / 2, teacher.hidden @ teacher.weight.T / 2
    expected = 0.18 * (TF.pad(plain[0], (0, more)) - plain[1]).square().sum(-1)[target != -100].mean()
    agree((alone, []), (expected, []), Model(m.hidden, None, None))


def test_sums_of_chunks_are_fp32():
    """In bf16, 512 equal addends would stop to count."""
    rows, ones = 512, torch.ones(1, 1, dtype=torch.bfloat16)
    student = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = ones.clone().requires_grad_()
    loss = distillation_class(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, chunk_size=1).apply(
        student, weight, student, 0 * ones, torch.zeros(rows, dtype=torch.long), None, None
    )
    loss.backward()
    assert abs(weight.grad.item() - 2) < 0.05
