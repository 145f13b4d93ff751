"""What all losses of liger_ops.losses share: adapters of a head, dtypes, and no logits of all tokens. Also on a GPU, with
the default budgets, of the adapters to other packages."""

from functools import partial

import pytest
import torch

from liger_ops import compat, losses
from tests.support.checks import check_results
from tests.support.families.post_training import Model, model, targets
from tests.support.host.allocations import largest_allocation

NAMES = ["dpo", "orpo", "kto", "grpo", "distillation", "topk", "cosine"]


def loss_of(name, target, teacher, **options):
    """A function of hidden, weight and other named tensors of a head. target: (sequences, tokens)"""
    device, rows, ids = target.device, len(target), target.clamp(min=0)
    reference = dict(ref_hidden=teacher.hidden, ref_weight=teacher.weight)
    other = dict(teacher_hidden=teacher.hidden, teacher_weight=teacher.weight, target=target, hard_weight=0.5)
    top = dict(
        teacher_ids=(ids.unsqueeze(-1) + torch.arange(3, device=device)) % len(teacher.weight),
        teacher_log_probs=-1.5 - torch.rand(*target.shape, 3, device=device, dtype=teacher.hidden.dtype),
    )
    policy = dict(mask=target != -100, advantages=torch.randn(rows, device=device), beta=0.1)
    calls = {
        "dpo": partial(losses.dpo_loss, target=target, **reference),
        "orpo": partial(losses.orpo_loss, target=target, nll_target=target),
        "kto": partial(
            losses.kto_loss, target=target, desirable=torch.arange(rows, device=device) % 3 > 0, **reference
        ),
        "grpo": partial(losses.grpo_loss, target=ids, **policy, **reference),
        "distillation": partial(losses.distillation_loss, beta=0.3, **other),
        "topk": partial(losses.topk_distillation_loss, target=target, hard_weight=0.5, temperature=2.0, **top),
        "cosine": partial(losses.cosine_distillation_loss, **other),
    }
    return lambda **head: calls[name](**head, **options)[0]


def in_dtype(m, dtype):
    return Model(*(None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in m))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_gives_fp32_losses(name):
    m, teacher = (in_dtype(model(4, 7, frozen=frozen), torch.bfloat16) for frozen in (False, True))
    found = loss_of(name, targets(4, 7), teacher)(**m._asdict())
    found.backward()
    assert found.dtype == torch.float32 and m.weight.grad.dtype == torch.bfloat16 and teacher.weight.grad is None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cosine"])
def test_adapters(name):
    """As a head whose input and weight have more columns. The reference model has no adapter."""
    names, sizes = ("hidden", "weight", "low_rank_input", "low_rank_weight"), ((4, 6, 16), (37, 16), (4, 6, 5), (37, 5))
    given = [(torch.randn(size) / size[-1] ** 0.5).requires_grad_() for size in sizes]
    options = dict(entropy_weight=0.1) if name == "grpo" else {}
    loss = loss_of(name, targets(4, 6), in_dtype(model(4, 6, frozen=True), torch.float32), **options)

    def of_merged(x, weight, t, b):
        return loss(hidden=torch.cat([x, t], -1), weight=torch.cat([weight, b], -1))

    found = loss(**dict(zip(names, given)))
    check_results([found.detach(), *torch.autograd.grad(found, given)], of_merged, given, [torch.ones(())])


@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_of_tokens_times_classes(name):
    """No allocation of forward and backward is as large as that, in fp32. Any chunk and any gradient are far smaller."""
    tokens, classes, rows = 512, 1000, (8, 64)
    m, teacher = (in_dtype(model(*rows, classes=classes, frozen=frozen), torch.float32) for frozen in (False, True))
    loss = loss_of(name, targets(*rows, classes=classes), teacher, memory_budget=64 * classes * 16)
    assert largest_allocation(lambda: torch.autograd.grad(loss(**m._asdict()), list(m))) < tokens * classes * 4


# ---- On a GPU


ROWS, WIDTH, CLASSES = (16, 2048), 128, 131072
# Logits are 8 GiB in bf16. Gradients and the widest chunks are far smaller.
LIMIT = 3 << 30


def of_other_packages():
    """Name: the loss of a model, a teacher, and targets of shape ROWS."""
    from liger_ops.compat import chunked_distillation, chunked_loss, chunked_policy, ops
    from liger_ops.integrations import trl, verl

    def flat(m, teacher, target):
        x, t = (x.flatten(0, 1) for x in (m.hidden, teacher.hidden))
        return x, m.weight, t, teacher.weight, target.flatten()

    def grpo(m, t, y):
        call = m.hidden, m.weight, y.clamp(min=0), y != -100, torch.randn(16, device="cuda")
        return chunked_policy.LigerFusedLinearGRPOLoss()(*call, ref_input=t.hidden, ref_weight=t.weight)[0]

    def of_trl(m, t, y):
        call = m.hidden.flatten(0, 1), m.weight, None, y.flatten().clamp(min=0), 1.0, 32768
        return trl.ChunkedLogProbFunction.apply(*call)[0].sum()

    def divergence_of_trl(m, t, y):
        return trl.chunked_divergence_loss(m.hidden, t.hidden, m.weight, t.weight, y != -100, 0.5)[0]

    cosine = chunked_distillation.LigerFusedLinearCosineSimilarityLoss
    return {
        "chunked_loss dpo": lambda m, t, y: chunked_loss.LigerFusedLinearDPOLoss()(m.weight, m.hidden, y, None, *t)[0],
        "chunked_loss grpo": grpo,
        "chunked_loss jsd": lambda *call: chunked_distillation.LigerFusedLinearJSDLoss()(*flat(*call)),
        "chunked_loss cosine": lambda *call: cosine()(*flat(*call)),
        "fused_linear_jsd": lambda *call: ops.LigerFusedLinearJSDFunction.apply(*flat(*call)),
        "trl log-probs": of_trl,
        "trl divergence": divergence_of_trl,
        "verl": lambda m, t, y: verl.FusedLinearForPPO()(m.hidden, m.weight, y.clamp(min=0))[0].sum(),
    }


OTHERS = [
    "chunked_loss dpo", "chunked_loss grpo", "chunked_loss jsd", "chunked_loss cosine", "fused_linear_jsd",
    "trl log-probs", "trl divergence", "verl",
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_peak_memory(name, frozen_head):
    assert not compat.installed()

    def made(*shape, grad):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(0.3).requires_grad_(grad)

    m = Model(made(*ROWS, WIDTH, grad=True), made(CLASSES, WIDTH, grad=not frozen_head), None)
    teacher = Model(made(*ROWS, WIDTH, grad=False), made(CLASSES, WIDTH, grad=False), None)
    target = torch.randint(CLASSES - 8, ROWS, device="cuda").masked_fill(torch.rand(ROWS, device="cuda") < 0.1, -100)
    if name in OTHERS:
        loss = partial(of_other_packages()[name], m, teacher, target)
    else:
        loss = partial(loss_of(name, target, teacher), hidden=m.hidden, weight=m.weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss().backward()
    assert m.hidden.grad.isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < LIMIT
