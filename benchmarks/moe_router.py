"""moe_router(logits: (tokens, experts)), eight experts per token, with the statistics of its losses"""

import torch

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op

CHOICES = 8


def inputs(make, tokens, experts):
    # No two experts of a token have the same logit, with which implementations choose differently.
    ranks = make.normal(tokens, experts).argsort(-1)
    return {"logits": ((ranks - experts // 2) / 16).to(make.dtype)}


def traffic(size, tokens, experts):
    # Logits in, weights and indices out; both in again with the weights' gradient, the logits' gradient out.
    return tokens * (experts * size + CHOICES * 12), tokens * (2 * experts * size + CHOICES * 12)


def formula(logits):
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = x.softmax(-1)
    weights, index = scores.topk(CHOICES)
    tokens = torch.zeros_like(scores).scatter(-1, index, 1.0).sum(0)
    balance = (tokens * scores.sum(0)).sum()
    return weights / weights.sum(-1, keepdim=True), balance, x.logsumexp(-1).square().sum()


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.moe_router.default

    def call(logits):
        weights, _, tokens, scores, z = op(logits, CHOICES, statistics=True)
        return weights, (tokens * scores).sum(), z

    return call


OP = Op(
    dims=("tokens", "experts"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"ours": ours},
    # Experts of OLMoE, Qwen3-MoE and DeepSeek-V3.
    shapes={
        "quick-cpu": [(64, 64), (1024, 128)],
        "quick": [(1024, 64), (16384, 128), (16384, 256)],
        "full": [(tokens, experts) for tokens in (1024, 16384, 65536) for experts in (8, 64, 128, 256)],
    },
    anchors=(
        Anchor((16384, 128), "bfloat16", NO_SLOWER_THAN_EAGER),
        Anchor((1024, 128), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
)
