"""Losses and adapters never hold the logits of all tokens on a GPU, with the default budgets."""

import pytest
import torch
from post_training import Model

from liger_ops import compat, losses

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, CLASSES = 32768, 128, 131072
ROWS = 16, TOKENS // 16
# Logits are 8 GiB in bf16. Gradients and the widest chunks are far smaller.
LIMIT = 3 << 30


def cases():
    """Name: the loss of a model, a teacher, targets of shape ROWS, and a mask."""
    from liger_ops.compat import chunked_distillation, chunked_loss, chunked_policy, ops
    from liger_ops.integrations import trl, verl

    def flat(m, teacher, target):
        x, t = (x.flatten(0, 1) for x in (m.hidden, teacher.hidden))
        return x, m.weight, t, teacher.weight, target.flatten()

    def of_teachers_top(m, target):
        ids = target.clamp(min=0).unsqueeze(-1) + torch.arange(8, device=target.device)
        logs = torch.full(ids.shape, -3.0, device=ids.device)
        return losses.topk_distillation_loss(m.hidden, m.weight, ids, logs, target, hard_weight=0.5)[0]

    def grpo(loss, m, target, **options):
        return loss(m.hidden, m.weight, target.clamp(min=0), target != -100, torch.randn(16, device="cuda"), **options)[
            0
        ]

    yield "dpo", lambda m, t, y: losses.dpo_loss(m.hidden, m.weight, y, ref_hidden=t.hidden, ref_weight=t.weight)[0]
    yield "orpo", lambda m, t, y: losses.orpo_loss(m.hidden, m.weight, y, nll_target=y)[0]
    yield "kto", lambda m, t, y: losses.kto_loss(m.hidden, m.weight, y, torch.arange(16, device="cuda") < 5)[0]
    yield "grpo", lambda m, t, y: grpo(losses.grpo_loss, m, y, beta=0.1, ref_hidden=t.hidden, ref_weight=t.weight)
    yield "distillation", lambda m, t, y: losses.distillation_loss(*m[:2], *t[:2], y, beta=0.5, hard_weight=0.5)[0]
    yield "topk", lambda m, t, y: of_teachers_top(m, y)
    yield "cosine", lambda m, t, y: losses.cosine_distillation_loss(*m[:2], *t[:2], y, hard_weight=0.5)[0]
    yield "chunked_loss dpo", lambda m, t, y: chunked_loss.LigerFusedLinearDPOLoss()(m.weight, m.hidden, y, None, *t)[0]
    yield (
        "chunked_loss grpo",
        lambda m, t, y: grpo(chunked_policy.LigerFusedLinearGRPOLoss(), m, y, ref_input=t.hidden, ref_weight=t.weight),
    )
    yield "chunked_loss jsd", lambda m, t, y: chunked_distillation.LigerFusedLinearJSDLoss()(*flat(m, t, y))
    yield (
        "chunked_loss cosine",
        lambda m, t, y: chunked_distillation.LigerFusedLinearCosineSimilarityLoss()(*flat(m, t, y)),
    )
    yield "fused_linear_jsd", lambda m, t, y: ops.LigerFusedLinearJSDFunction.apply(*flat(m, t, y))
    yield (
        "trl log-probs",
        lambda m, t, y: trl.ChunkedLogProbFunction.apply(
            m.hidden.flatten(0, 1), m.weight, None, y.flatten().clamp(min=0), 1.0, 32768
        )[0].sum(),
    )
    yield (
        "trl divergence",
        lambda m, t, y: trl.chunked_divergence_loss(m.hidden, t.hidden, m.weight, t.weight, y != -100, 0.5)[0],
    )
    yield "verl", lambda m, t, y: verl.FusedLinearForPPO()(m.hidden, m.weight, y.clamp(min=0))[0].sum()


NAMES = [
    "dpo", "orpo", "kto", "grpo", "distillation", "topk", "cosine", "chunked_loss dpo", "chunked_loss grpo",
    "chunked_loss jsd", "chunked_loss cosine", "fused_linear_jsd", "trl log-probs", "trl divergence", "verl",
]  # fmt: skip


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_peak(name, frozen_head):
    assert not compat.installed()
    loss = dict(cases())[name]

    def made(*shape, grad):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(0.3).requires_grad_(grad)

    m = Model(made(*ROWS, WIDTH, grad=True), made(CLASSES, WIDTH, grad=not frozen_head), None)
    teacher = Model(made(*ROWS, WIDTH, grad=False), made(CLASSES, WIDTH, grad=False), None)
    target = torch.randint(CLASSES - 8, ROWS, device="cuda").masked_fill(torch.rand(ROWS, device="cuda") < 0.1, -100)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss(m, teacher, target).backward()
    assert m.hidden.grad.isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < LIMIT
