"""The policy-gradient loss agrees with its formula on whole logits, in fp64, for every variant and option."""

import itertools
import math

import pytest
import torch

from liger_ops import losses
from liger_ops.losses.grpo import LOSS_TYPES
from tests.support.families.post_training import (
    CLASSES,
    B,
    S,
    agree,
    all_log_probs,
    model,
    of_ids,
)  # fmt: skip

T = 0.8
TOKEN_LEVEL = ("cispo", "sapo", "vespo")


def batch(seed=0):
    torch.manual_seed(seed)
    ids, mask = torch.randint(CLASSES, (B, S)), (torch.rand(B, S) < 0.7).long()
    mask[:, 0], mask[0] = 1, 1
    return ids, mask, torch.randn(B).double()


def token_formula(
    log_p, old, advantage, sequence_ratio, loss_type, epsilon_low, epsilon_high, delta, sampler, phi, pos, neg
):  # fmt: skip
    """One token: floats or scalar tensors."""
    ratio = torch.exp(log_p - old) if sequence_ratio is None else sequence_ratio
    if loss_type == "cispo":
        loss = -min(ratio.item(), epsilon_high) * advantage * log_p
    elif loss_type == "sapo":
        t = pos if advantage > 0 else neg
        loss = -advantage * 4 / t / (1 + torch.exp(-t * (ratio - 1)))
    elif loss_type == "vespo":
        return -phi * advantage * log_p
    else:
        first = ratio if delta is None else torch.minimum(ratio, torch.tensor(delta, dtype=torch.float64))
        second = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        loss = -torch.minimum(first * advantage, second * advantage)
    return loss * sampler


def formula(
    log_probs, mask, advantages, old, ref, sampler, loss_type, level, beta, low, high, delta, corrected, items, longest
):
    """Token by token."""
    rows, sizes = [], mask.sum(-1)
    for b in range(B):
        kept = [s for s in range(S) if mask[b, s]]
        log_p = [log_probs[b, s] for s in kept]
        before = [p.detach() for p in log_p] if old is None else [old[b, s] for s in kept]
        sampled = [1.0 if sampler is None else sampler[b, s] for s in kept]
        mean = torch.exp(sum(p - o for p, o in zip(log_p, before)) / len(kept)) if level == "sequence" else None
        # VESPO's weight of the sequence.
        w = math.exp(min(20, max(math.log(1e-8), sum((p - o).item() for p, o in zip(log_p, before)))))
        k, rate = (2.0, 3.0) if advantages[b] >= 0 else (3.0, 2.0)
        phi = w**k * math.exp(rate * (1 - w))
        total = []
        for p, o, s, v in zip(log_p, before, kept, sampled):
            loss = token_formula(p, o, advantages[b], mean, loss_type, low, high, delta, v, phi, 1.0, 1.05)
            if beta:
                q = p.detach() if ref is None else ref[b, s]
                kl = torch.exp(q - p) - (q - p) - 1
                loss = loss + beta * kl * ((torch.exp(p - o) if mean is None else mean) if corrected else 1)
            total.append(loss)
        rows.append(sum(total))
    rows = torch.stack(rows)
    return {
        "grpo": (rows / sizes).mean(),
        "sapo": (rows / sizes).mean(),
        "bnpo": rows.sum() / sizes.sum(),
        "dr_grpo": rows.sum() / (B * (longest or 1)),
        "luspo": rows.mean(),
    }.get(loss_type, rows.sum() / (sizes.sum() if items is None else items))


CASES = [
    (kind, level, beta, old, sampler, delta, corrected)
    for kind, level, (beta, corrected), old, sampler, delta in itertools.product(
        LOSS_TYPES, ("token", "sequence"), ((0.0, False), (0.1, False), (0.1, True)), *[(False, True)] * 2, (None, 1.1)
    )
    if not (kind in TOKEN_LEVEL and (level == "sequence" or delta))
    and not (kind == "vespo" and sampler)
]  # fmt: skip


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_variants(kind):
    m, ref = model(B, S), model(B, S, width=12, frozen=True)
    ids, mask, advantages = batch()
    ref_log_probs = of_ids(all_log_probs(ref, T), ids)
    old_log_probs = (of_ids(all_log_probs(m, T), ids) + 0.4 * torch.randn(B, S)).detach()
    ratio = torch.rand(B, S).double() + 0.5
    high = 1.1 if kind == "cispo" else 0.25
    cases = [case for case in CASES if case[0] == kind]
    assert len(cases) >= 6
    for _, level, beta, old, sampler, delta, corrected in cases:
        old_given, sampled = old_log_probs if old else None, ratio if sampler else None
        options = dict(
            loss_type=kind, importance_sampling_level=level, beta=beta, old_log_probs=old_given, vllm_is_ratio=sampled,
            delta=delta, use_bias_correction_kl=corrected, epsilon_high=high, epsilon_low=0.15, temperature=T,
            max_completion_length=9, num_items_in_batch=30, ref_hidden=ref.hidden, ref_weight=ref.weight,
            ref_bias=ref.bias,
        )  # fmt: skip

        def ours(m, options=options):
            return losses.grpo_loss(m.hidden, m.weight, ids, mask, advantages, m.bias, **options)[0]

        def expected(m, old=old_given, sampled=sampled, level=level, beta=beta, delta=delta, corrected=corrected):
            logs = of_ids(all_log_probs(m, T), ids)
            rest = level, beta, 0.15, high, delta, corrected, 30, 9
            return formula(logs, mask, advantages, old, ref_log_probs, sampled, kind, *rest)

        agree(ours, expected, m)


def test_given_reference_and_no_number_of_items():
    m = model(B, S)
    ids, mask, advantages = batch()
    ref = -torch.rand(B, S).double() * 3
    for kind in ("dapo", "cispo", "vespo"):
        agree(
            lambda m, k=kind: losses.grpo_loss(m.hidden, m.weight, ids, mask, advantages, m.bias, loss_type=k, beta=0.2,
                                               ref_log_probs=ref, epsilon_high=0.2)[0],
            lambda m, k=kind: formula(of_ids(all_log_probs(m), ids), mask, advantages, None, ref, None, k, "token", 0.2,
                                      0.2, 0.2, None, False, None, None),
            m,
        )  # fmt: skip


def test_advantages_of_tokens_and_the_samplers_shapes():
    m = model(B, S)
    ids, mask, advantages = batch()
    call = m.hidden, m.weight, ids, mask
    by_token = losses.grpo_loss(*call, advantages.unsqueeze(1).expand(B, S))[0]
    torch.testing.assert_close(by_token, losses.grpo_loss(*call, advantages)[0])
    ratio = torch.rand(B).double() + 0.5
    for kind in ("dapo", "vespo"):
        one, two = (
            losses.grpo_loss(*call, advantages, loss_type=kind, vllm_is_ratio=r)[0] for r in (ratio, ratio[:, None])
        )
        assert torch.equal(one, two)


def test_vespo_includes_the_sampler_in_its_weights():
    m = model(B, S)
    ids, mask, advantages = batch()
    ratio = torch.rand(B).double() + 0.5

    def expected(m):
        logs = of_ids(all_log_probs(m), ids)
        k, rate = (torch.where(advantages >= 0, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
        phi = ratio**k * torch.exp(rate * (1 - ratio))
        return -(phi[:, None] * advantages[:, None] * logs * mask).sum() / mask.sum()

    agree(lambda m: losses.grpo_loss(m.hidden, m.weight, ids, mask, advantages, m.bias, loss_type="vespo",
                                     vllm_is_ratio=ratio)[0], expected, m)  # fmt: skip


def test_entropy_bonus():
    m = model(B, S)
    ids, mask, advantages = batch()

    def expected(m):
        logs = all_log_probs(m)
        tokens = -torch.exp(of_ids(logs, ids) - of_ids(logs, ids).detach()) * advantages[:, None]
        entropy = -(logs.exp() * logs).sum(-1)
        return ((tokens - 0.3 * entropy) * mask).sum() / mask.sum()

    agree(
        lambda m: losses.grpo_loss(m.hidden, m.weight, ids, mask, advantages, m.bias, entropy_weight=0.3)[0],
        expected,
        m,
    )


def test_metrics():
    m = model(B, S)
    ids, mask, advantages = batch()
    logs = all_log_probs(m).detach()
    chosen = of_ids(logs, ids)
    old, ref = chosen + 0.5 * torch.randn(B, S), -torch.rand(B, S).double() * 3
    _, metrics = losses.grpo_loss(m.hidden, m.weight, ids, mask, advantages, m.bias, old_log_probs=old, beta=0.1,
                                  ref_log_probs=ref)  # fmt: skip
    ratio, gap = torch.exp(chosen - old), ref - chosen
    clipped = (ratio < 0.8) & (advantages[:, None] < 0) | (ratio > 1.2) & (advantages[:, None] > 0)
    expected = {"entropy": -(logs.exp() * logs).sum(-1), "clip_ratio": clipped.double(), "kl": gap.exp() - gap - 1}
    assert set(metrics) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(metrics[name], (values * mask).sum() / mask.sum())


def test_positions_that_do_not_count_do_not_matter():
    m = model(B, S)
    ids, mask, advantages = batch()
    old, ref = (-torch.rand(B, S).double() for _ in range(2))
    found = []
    for junk in (0.0, -math.inf, math.nan):
        spoiled = [t.masked_fill(mask == 0, junk) for t in (old, ref)]
        others = ids.masked_fill(mask == 0, -7)
        loss, _ = losses.grpo_loss(m.hidden, m.weight, others, mask, advantages, m.bias, beta=0.1,
                                   old_log_probs=spoiled[0], ref_log_probs=spoiled[1])  # fmt: skip
        found.append((loss, *torch.autograd.grad(loss, list(m))))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def test_a_batch_without_tokens():
    m = model(B, S)
    ids, _, advantages = batch()
    for kind in LOSS_TYPES:
        loss, _ = losses.grpo_loss(m.hidden, m.weight, ids, torch.zeros(B, S), advantages, loss_type=kind,
                                   max_completion_length=9)  # fmt: skip
        gradient = torch.autograd.grad(loss, m.weight)[0]
        assert loss == 0 and not gradient.any(), kind
