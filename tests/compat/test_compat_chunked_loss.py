"""liger_ops.compat: liger_kernel's losses of hidden states, with its arguments and its tuples of metrics."""

import pytest
import torch
import torch.nn.functional as TF
from torch.utils._pytree import tree_leaves

from liger_ops import losses
from tests.support.checks import assert_most_digits
from tests.support.families.post_training import CLASSES, B, Model, S, all_log_probs, model, of_ids, targets
from tests.support.host.solo_group import group_of_one, solo_group

pytestmark = pytest.mark.usefixtures("liger_kernel_served")
N = B * S


def single(m):
    return Model(*(None if t is None else t.detach().float().requires_grad_(t.requires_grad) for t in m))


def close(found, expected):
    found, expected = ([torch.as_tensor(t) for t in tree_leaves(given)] for given in (found, expected))
    assert_most_digits(found, expected)


def logits(m):
    return TF.linear(m.hidden, m.weight, m.bias)


# Arguments of a loss, and of liger_ops.losses for the same loss.
PREFERENCES = {
    "DPO": (dict(loss_type="robust", label_smoothing=0.2, beta=0.3, alpha=0.7, average_log_prob=True),
            dict(loss_type="robust", label_smoothing=0.2, beta=0.3, average_log_prob=True), 0.7),
    "CPO": (dict(label_smoothing=0.2, beta=0.3, alpha=0.7, average_log_prob=True),
            dict(label_smoothing=0.2, beta=0.3, average_log_prob=True), 0.7),
    "SimPO": (dict(label_smoothing=0.2, beta=0.3, alpha=0.7, gamma=0.1),
              dict(label_smoothing=0.2, beta=0.3, gamma=0.1), 0.7),
    "ORPO": (dict(beta=0.3), dict(beta=0.3), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("with_nll", [False, True])
@pytest.mark.parametrize("kind", PREFERENCES)
def test_preference_losses(kind, with_nll):
    import liger_kernel.chunked_loss as theirs
    import liger_kernel.chunked_loss.functional  # noqa: F401

    m, ref, target = single(model(B, S)), single(model(B, S, frozen=True)), targets(B, S)
    given, options, alpha = PREFERENCES[kind]
    reference = (ref.hidden, ref.weight, ref.bias) if kind == "DPO" else ()
    if kind == "DPO":
        options = options | dict(ref_hidden=ref.hidden, ref_weight=ref.weight, ref_bias=ref.bias)
    module = getattr(theirs, f"LigerFusedLinear{kind}Loss")(compute_nll_loss=with_nll, compiled=False, **given)
    loss, metrics = module(m.weight, m.hidden, target, m.bias, *reference)
    function = getattr(theirs.functional, f"liger_fused_linear_{kind.lower()}")
    close(function(m.hidden, m.weight, target, m.bias, *reference, compute_nll_loss=with_nll, **given), (loss, metrics))
    expected, names = getattr(losses, f"{kind.lower()}_loss")(
        m.hidden, m.weight, target, m.bias, nll_weight=alpha if with_nll else 0.0, **options
    )
    close(loss, expected)
    means = [half.mean() for half in logits(m).detach().chunk(2)]
    order = [names["chosen_log_probs"], names["rejected_log_probs"], *means, names["nll"] * with_nll,
             names["chosen_rewards"], names["rejected_rewards"]]  # fmt: skip
    if kind == "ORPO":
        order += [names["log_odds_ratio"], names["log_odds_chosen"]]
    close(list(metrics), order)
    assert not any(t.requires_grad for t in metrics)


def test_options_of_preference_functions():
    from liger_kernel.chunked_loss import functional as theirs

    m, target, other = single(model(B, S)), targets(B, S), targets(B, S)
    x, w, b = m
    # Of these types, the package ignores label_smoothing.
    for kind in ("sigmoid", "hinge"):
        found = theirs.liger_fused_linear_dpo(x, w, target, b, use_ref_model=False, loss_type=kind, label_smoothing=0.2)
        close(found[0], losses.dpo_loss(x, w, target, b, loss_type=kind)[0])
    found = theirs.liger_fused_linear_orpo(x, w, target, b, nll_target=other)
    close(found[0], losses.orpo_loss(x, w, target, b, nll_target=other)[0])
    with pytest.raises(ValueError, match="Unsupported loss_type: ipo"):
        theirs.liger_fused_linear_dpo(x, w, target, b, loss_type="ipo")


def test_kto():
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    m, ref, target = single(model(B, S)), single(model(B, S, frozen=True)), targets(B, S)
    liked, kl = torch.tensor([True, False, False, True]), torch.tensor([0.2])
    loss, metrics = LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, average_log_prob=True)(
        m.hidden, m.weight, target, m.bias, liked, *ref, kl
    )
    sums, ref_sums = (of_ids(all_log_probs(x), target).sum(-1) / (target != -100).sum(-1) for x in (m, ref))
    rewards = 0.3 * (sums - ref_sums)
    close(loss, (1 - torch.sigmoid(torch.where(liked, 1, -1) * (rewards - 0.3 * kl))).mean())
    by_label = [t[which].sum() for t in (sums, logits(m), rewards) for which in (liked, ~liked)]
    close(list(metrics), [t.detach() for t in by_label])


def grpo_batch():
    mask = (torch.rand(B, S) < 0.7).long()
    mask[:, 0] = 1
    return torch.randint(CLASSES, (B, S)), mask, torch.randn(B)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo(level, beta):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    m, ref = single(model(B, S)), single(model(B, S, frozen=True))
    ids, mask, advantages = grpo_batch()
    old, ratio = -torch.rand(B, S) * 4, torch.rand(B, S) + 0.5
    kinds = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
    for kind in kinds if level == "token" else kinds[:4]:
        delta = 1.2 if kind in kinds[:4] else None
        module = LigerFusedLinearGRPOLoss(
            beta=beta, loss_type=kind, max_completion_length=9, importance_sampling_level=level, temperature=0.8,
            delta=1.2, use_bias_correction_kl=True, epsilon_low=0.1, epsilon_high=0.3, sapo_temperature_pos=1.2,
            sapo_temperature_neg=0.9, vespo_k_pos=1.0, vespo_lambda_pos=2.0, vespo_k_neg=1.5, vespo_lambda_neg=2.5,
        )  # fmt: skip
        loss, metrics = module(
            m.hidden, m.weight, ids, mask, advantages, m.bias, old_per_token_logps=old, ref_input=ref.hidden,
            ref_weight=ref.weight, ref_bias=ref.bias, vllm_is_ratio=ratio, num_items_in_batch=40,
        )  # fmt: skip
        expected, names = losses.grpo_loss(
            m.hidden, m.weight, ids, mask, advantages, m.bias, beta=beta, loss_type=kind, max_completion_length=9,
            importance_sampling_level=level, temperature=0.8, delta=delta, use_bias_correction_kl=True, epsilon_low=0.1,
            epsilon_high=0.3, old_log_probs=old, ref_hidden=ref.hidden, ref_weight=ref.weight, ref_bias=ref.bias,
            vllm_is_ratio=ratio, num_items_in_batch=40, sapo_temperature_pos=1.2, sapo_temperature_neg=0.9,
            vespo_shapes=(1.0, 2.0, 1.5, 2.5),
        )  # fmt: skip
        close(loss, expected)
        close(list(metrics), [names[name] for name in (("kl",) if beta else ()) + ("clip_ratio",)])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_luspo_of_the_package_counts_padding(level):
    from liger_kernel.chunked_loss.functional import liger_fused_linear_grpo

    m = single(model(B, S))
    ids, mask, advantages = grpo_batch()
    old = -torch.rand(B, S) * 4
    loss, _ = liger_fused_linear_grpo(m.hidden, m.weight, ids, mask, advantages, m.bias, None, old, beta=0.0,
                                      loss_type="luspo", importance_sampling_level=level)  # fmt: skip
    ratio = of_ids(all_log_probs(m), ids) - old
    if level == "sequence":
        ratio = (ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    ratio, a = ratio.exp(), advantages[:, None]
    close(loss, (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * mask.sum(-1, keepdim=True)).mean())


@pytest.mark.parametrize("kind", ["dapo", "luspo", "dr_grpo", "vespo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_triton_grpo_loss(level, kind):
    from liger_kernel.transformers.grpo_loss import fused_selective_log_softmax, triton_grpo_loss

    if kind == "vespo" and level == "sequence":
        level = "token"
    z = torch.randn(B, S + 1, CLASSES, requires_grad=True)
    ids, mask, advantages = grpo_batch()
    old, ref = -torch.rand(B, S) * 4, -torch.rand(B, S) * 4
    logs = (z[:, :-1] / 0.9).log_softmax(-1)
    chosen = of_ids(logs, ids)
    close(fused_selective_log_softmax(z, torch.cat([ids, ids], 1), mask=mask), (chosen * mask).detach())
    options = dict(importance_sampling_level=level, loss_type=kind)
    per_token, kl, clipped = triton_grpo_loss(z, old, ref, ids, advantages, mask, **options)
    expected = losses.policy_losses(chosen, mask, advantages, old_log_probs=old, ref_log_probs=ref, beta=0.04,
                                    epsilon_high=0.4, **options)  # fmt: skip
    close(
        (per_token, kl, clipped),
        tuple((t * mask).expand(B, S) for t in (expected.losses, expected.kl.detach(), expected.clipped)),
    )
    loss, metrics = triton_grpo_loss(z, old, ref, ids, advantages, mask, reduce=True, **options)
    sizes = mask.sum(-1, keepdim=True)
    close(loss, {
        "luspo": (per_token * sizes).mean(), "dr_grpo": per_token.sum() / (B * S),
    }.get(kind, per_token.sum() / sizes.sum()))  # fmt: skip
    close(metrics, [kl.sum() / sizes.sum(), clipped.sum() / sizes.sum()])
    (gradient,) = torch.autograd.grad(loss, z)
    assert gradient.any() and not gradient[:, -1].any()
    assert len(triton_grpo_loss(z, None, None, ids, advantages, beta=0.0, reduce=True)[1]) == 1


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("kind", ["grpo", "cispo", "vespo"])
def test_grpo_function_of_autograd(kind, reduce):
    """VESPO's weights of sequences come from the caller."""
    from liger_kernel.chunked_loss.grpo_loss import get_gamma_weights
    from liger_kernel.ops.grpo_loss import GrpoLossFunction
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    z = torch.randn(B, S + 1, CLASSES, requires_grad=True)
    ids, mask, advantages = grpo_batch()
    old, ref, ratio = -torch.rand(B, S) * 4, -torch.rand(B, S) * 4, torch.rand(B) + 0.5
    log_ratio = of_ids((z[:, :-1] / 0.8).log_softmax(-1), ids).detach() - old
    weights = get_gamma_weights(advantages, log_ratio, mask, ratio[:, None], 1.0, 2.0, 1.5, 2.5)
    of_vespo = dict(vespo_k_pos=1.0, vespo_lambda_pos=2.0, vespo_k_neg=1.5, vespo_lambda_neg=2.5)
    found = GrpoLossFunction.apply(z, old, ref, ids, advantages, mask, 0.8, 0.1, 0.2, 0.3, True, kind, None, reduce, "token",
                                   1.0, 1.05, None if kind == "vespo" else ratio, None, True, 40, weights)  # fmt: skip
    expected = triton_grpo_loss(z, old, ref, ids, advantages, mask, 0.8, 0.1, 0.2, 0.3, True, kind, vllm_is_ratio=ratio,
                                use_bias_correction_kl=True, num_items_in_batch=40, reduce=reduce, **of_vespo)  # fmt: skip
    expected = (expected[0], *expected[1]) if reduce else expected
    assert len(found) == 3
    close(found, expected)
    close(*(torch.autograd.grad(t[0].sum(), z) for t in (found, expected)))
    if kind == "vespo":
        with pytest.raises(ValueError, match="phi_seq must be given"):
            GrpoLossFunction.apply(z, old, ref, ids, advantages, mask, 0.8, 0.1, 0.2, 0.3, True, kind)


def test_vespos_weights():
    from liger_kernel.chunked_loss.grpo_loss import get_gamma_weights

    advantages, log_ratio = torch.tensor([1.0, -1.0]), torch.tensor([[0.1, 0.2, 9.0], [-0.3, 0.4, 9.0]])
    mask = torch.ones(2, 3)
    mask[:, 2] = 0
    w = torch.tensor([0.3, 0.1]).double()
    for ratio, factor in ((None, 1.0), (torch.full((2, 1), 0.5), 0.5)):
        each = w.exp() * factor
        k, rate = torch.tensor([2.0, 3.0]).double(), torch.tensor([3.0, 2.0]).double()
        expected = (rate * (1 - each)).exp() * each**k
        found = get_gamma_weights(advantages.requires_grad_(), log_ratio, mask, ratio)
        assert found.shape == (2, 1) and not found.requires_grad
        close(found.squeeze(1), expected.float())


def test_parts_of_policy_losses():
    from liger_kernel.chunked_loss.grpo_loss import clip_coef_fn, k3_loss_fn, sapo_loss_fn
    from liger_kernel.transformers.grpo_loss import _masked_mean, _reduce_grpo_loss

    p, q, ratio = -torch.rand(3, 4), -torch.rand(3, 4), torch.tensor([0.5, 1.0, 3.0], requires_grad=True)
    close(k3_loss_fn(p, q), (p - q).exp() - (p - q) - 1)
    close(sapo_loss_fn(ratio, 2.0), 2 * torch.sigmoid(2 * (ratio - 1)))
    with pytest.raises(ValueError, match="must be above 0"):
        sapo_loss_fn(ratio, 0.0)
    clipped, low, high = clip_coef_fn(ratio, 0.2, 0.3, "grpo")
    close(clipped, torch.tensor([0.8, 1.0, 1.3]))
    assert low.tolist() == [True, False, False] and high.tolist() == [False, False, True]
    clipped, low, high = clip_coef_fn(ratio, 0.2, 2.0, "cispo")
    assert clipped.tolist() == [0.5, 1.0, 2.0] and not clipped.requires_grad and low is False and high.tolist()[2]
    clipped, low, high = clip_coef_fn(ratio, 0.2, 0.3, "sapo")
    assert clipped is None and not low.any() and not high.any()

    losses, mask = torch.rand(3, 4), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    total, sizes = (losses * mask).sum(), mask.sum(-1)
    close(_masked_mean(losses, mask), total / 6)
    for kind, expected in (
        ("grpo", ((losses * mask).sum(-1) / sizes).mean()), ("bnpo", total / 6), ("dapo", total / 6),
        ("dr_grpo", total / 12), ("luspo", (losses * sizes[:, None]).mean()),
    ):  # fmt: skip
        close(_reduce_grpo_loss(losses, mask, kind, None), expected)
    close(_reduce_grpo_loss(losses, None, "dr_grpo", 10), losses.sum() / 30)
    close(_reduce_grpo_loss(losses, mask, "dapo", None, 24), total / 24)


def test_options_that_policy_losses_refuse():
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    m, z = single(model(B, S)), torch.randn(B, S + 1, CLASSES)
    ids, mask, advantages = grpo_batch()
    call = z, None, None, ids, advantages, mask
    for kind in ("cispo", "sapo", "vespo"):
        with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported"):
            triton_grpo_loss(*call, beta=0.0, loss_type=kind, importance_sampling_level="sequence")
        with pytest.raises(ValueError, match="delta .* is not supported"):
            triton_grpo_loss(*call, beta=0.0, loss_type=kind, delta=2.0)
        with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported"):
            LigerFusedLinearGRPOLoss(loss_type=kind, importance_sampling_level="sequence", beta=0.0)(
                m.hidden, m.weight, ids, mask, advantages
            )
    for ratio in (torch.ones(B + 1), torch.ones(B, S - 1), torch.ones(1, B, S)):
        with pytest.raises(AssertionError, match="vllm_is_ratio must have one of the shapes"):
            triton_grpo_loss(*call, beta=0.0, vllm_is_ratio=ratio)


def test_options_that_dpo_refuses():
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
    from liger_kernel.chunked_loss.functional import liger_fused_linear_dpo

    m, target = single(model(B, S)), targets(B, S)
    for kind, smoothing in (("exo_pair", 0.0), ("exo_pair", -0.1), ("robust", 0.5), ("robust", -0.1)):
        for call in (
            lambda options: LigerFusedLinearDPOLoss(**options),
            lambda options: liger_fused_linear_dpo(m.hidden, m.weight, target, use_ref_model=False, **options),
        ):
            with pytest.raises(ValueError, match=f"label_smoothing must .*{kind}"):
                call(dict(loss_type=kind, label_smoothing=smoothing))
    for kind, smoothing in (("exo_pair", 1e-3), ("robust", 0.0), ("robust", 0.49), ("sigmoid", 0.9)):
        assert LigerFusedLinearDPOLoss(loss_type=kind, label_smoothing=smoothing).label_smoothing == smoothing


# ---- Distillation


@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("kind", ["JSD", "CosineSimilarity"])
def test_distillation(kind, more):
    """Where the teacher has more classes, the student's logits of these are 0 in the soft loss."""
    import liger_kernel.chunked_loss as theirs

    m, target = single(model(N)), targets(N)
    teacher = single(model(N, width=12, classes=CLASSES + more, frozen=True))
    counted = target != -100
    student = TF.pad(logits(m), (0, more))
    if kind == "JSD":
        q, p = ((z / 2).softmax(-1) for z in (student, logits(teacher)))
        mixture = (0.7 * q + 0.3 * p).log()
        soft = (0.3 * p * (p.log() - mixture) + 0.7 * q * (q.log() - mixture)).sum(-1)
    else:
        soft = 0.3 * (1 - TF.cosine_similarity(student, logits(teacher), -1))
    soft, hard = soft[counted].mean(), TF.cross_entropy(logits(m), target)
    for weights in ((0.4, 0.6), (0.0, 0.6), (0.4, 0.0)):
        module = getattr(theirs, f"LigerFusedLinear{kind}Loss")(*weights, 0.3, -100, 2.0, return_soft_hard_loss=True)
        found = module(m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias)
        close(found, (weights[0] * hard + weights[1] * soft, soft, hard))
        module.return_soft_hard_loss = False
        alone = module(m.hidden, m.weight, teacher.hidden, teacher.weight, target, m.bias, teacher.bias)
        close(alone, found[0])
        gradients = [torch.autograd.grad(x, list(m), retain_graph=True)
                     for x in (alone, weights[0] * hard + weights[1] * soft)]  # fmt: skip
        close(*gradients)


def test_labels_of_fused_linear_jsd():
    """None, and all of them ignored."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    m, teacher = single(model(N)), single(model(N, width=12, frozen=True))
    loss, call = LigerFusedLinearJSD(0.1, temperature=2.0), (m.hidden, m.weight, teacher.hidden, teacher.weight)
    close(loss(*call, None), loss(*call, torch.zeros(N, dtype=torch.long)))
    assert loss(*call, torch.full((N,), -100)) == 0


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_reductions_of_fused_linear_kl_div(reduction):
    from liger_kernel.transformers import LigerFusedLinearKLDivLoss

    m, labels = single(model(N)), targets(N)
    p = torch.rand(N, CLASSES).softmax(-1).requires_grad_()
    for given in (labels, None):
        kept = slice(None) if given is None else given != -100
        logs = ((m.hidden @ m.weight.T) / 2).log_softmax(-1)
        found = LigerFusedLinearKLDivLoss(reduction, temperature=2.0)(m.hidden, m.weight, p, given)
        close(found, TF.kl_div(logs[kept], p[kept], reduction=reduction))
        assert torch.autograd.grad(found, p, allow_unused=True)[0] is None
    assert LigerFusedLinearKLDivLoss(reduction)(m.hidden, m.weight, p, torch.full((N,), -100)) == 0
    with pytest.raises(ValueError, match="reduction must be one of"):
        LigerFusedLinearKLDivLoss("none")(m.hidden, m.weight, p)


def test_cross_entropy_and_total_variation_distance_are_fp32():
    from liger_kernel.transformers import LigerFusedCETVDLoss

    student, teacher, target = torch.randn(N, CLASSES), torch.randn(N, CLASSES), targets(N)
    half = LigerFusedCETVDLoss()(student.bfloat16(), teacher.bfloat16(), target)
    assert [t.dtype for t in half] == [torch.float32] * 2
    with pytest.raises(ValueError, match="must have shapes"):
        LigerFusedCETVDLoss()(student, teacher[1:], target)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selected_ids_of_scaled_cross_entropy(dtype, entropy):
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Loss

    m, target, selected = model(N, bias=False), targets(N), torch.tensor([3, 1, 3])
    x, w = (t.detach().to(dtype).requires_grad_() for t in m[:2])
    *found, chosen = Loss.apply(x, w, target, 0.7, -100, 1, entropy, selected)
    assert [t.dtype for t in (*found, chosen)] == [torch.float32, *[dtype] * entropy, torch.float32]
    close(found, Loss.apply(x, w, target, 0.7, -100, 1, entropy))
    # The loss of an id is the loss of a target.
    ids = [torch.where(target == -100, -100, i) for i in selected]
    expected = -torch.stack([Loss.apply(x, w, i, 0.7, -100, 1, False) for i in ids], -1)
    close(chosen, expected)
    if dtype == torch.float32:
        upstream = torch.randn(N, 3)
        close(*(torch.autograd.grad(t, (x, w), upstream) for t in (chosen, expected)))


def test_scaled_cross_entropy_over_a_group():
    from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp as loss

    solo_group()
    m, target = single(model(N, bias=False)), targets(N)
    call = m.hidden, m.weight, target, group_of_one(), 0.7
    close(loss(*call), loss(*call, return_entropy=True)[0])


@pytest.mark.parametrize("mode", ["global", "partition"])
@pytest.mark.parametrize("formula", ["pytorch", "megatron"])
def test_vocab_parallel_cross_entropy(formula, mode):
    from liger_kernel.transformers import LigerVocabParallelCrossEntropy

    z, target = torch.randn(S, B, CLASSES, requires_grad=True), targets(S, B)
    logs = z.log_softmax(-1)
    others = logs.sum(-1) - (of_ids(logs, target) if formula == "megatron" else 0)
    count = CLASSES - (formula == "megatron")
    expected = (-0.9 * of_ids(logs, target) - 0.1 * others / count).masked_fill(target == -100, 0)
    module = LigerVocabParallelCrossEntropy(
        label_smoothing=0.1, label_smoothing_formula=formula, label_smoothing_mode=mode
    )
    for group in (None, group_of_one()):
        found = module(z, target, group)
        close(found, expected)
        close(*(torch.autograd.grad(x.sum(), z, retain_graph=True) for x in (found, expected)))
    with pytest.raises(ValueError, match="label_smoothing_mode must be one of"):
        LigerVocabParallelCrossEntropy(label_smoothing_mode="local")
    with pytest.raises(ValueError, match="must be 3-D"):
        module(z[0], target[0])
