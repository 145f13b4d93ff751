"""moe_experts(x: (tokens, hidden), experts of width `inner`, each token through `choices` of them)"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from benchmarks.op import Anchor, Op

CHECKED_TOKENS = 512


def inputs(make, tokens, hidden, inner, experts, choices):
    scores, index = make.normal(tokens, experts).float().softmax(-1).topk(choices, -1)
    return {
        "x": make.normal(tokens, hidden),
        "gate_up": make.normal(experts, 2 * inner, hidden).mul_(hidden**-0.5),
        "down": make.normal(experts, hidden, inner).mul_(inner**-0.5),
        "index": index,
        "weight": (scores / scores.sum(-1, keepdim=True)).to(make.dtype),
    }


def traffic(size, tokens, hidden, inner, experts, choices):
    read = (tokens * hidden + 3 * experts * hidden * inner) * size
    return read + tokens * hidden * size, 2 * read


def flops(tokens, hidden, inner, experts, choices):
    products = 3 * 2 * tokens * choices * hidden * inner
    return products, 2 * products


def gradients(size, tokens, hidden, inner, experts, choices):
    return (tokens * hidden + 3 * experts * hidden * inner + tokens * choices) * size


def checked(tokens, hidden, inner, experts, choices):
    return min(tokens, CHECKED_TOKENS), hidden, inner, experts, choices


def formula(x, gate_up, down, index, weight):
    """What transformers computes: with grouped GEMMs where PyTorch has them, else expert by expert."""
    if x.is_meta:
        return torch.empty_like(x)
    return (grouped if x.is_cuda and x.dtype == torch.bfloat16 else one_by_one)(x, gate_up, down, index, weight)


def one_by_one(x, gate_up, down, index, weight):
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, choice = torch.where(index == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down[expert]) * weight[token, choice, None]
        out = out.index_add(0, token, rows.to(x.dtype))
    return out


def grouped(x, gate_up, down, index, weight):
    tokens, choices = index.shape
    expert, order = index.reshape(-1).sort()
    counts = torch.histc(expert.int(), bins=len(gate_up), min=0, max=len(gate_up) - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order // choices], gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)
    rows = rows * weight.reshape(-1)[order, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return rows[inverse].view(tokens, choices, -1).sum(1).to(x.dtype)


@lru_cache(2)
def rows_like(pairs, n, dtype, device):
    return torch.randn(pairs, n, dtype=dtype, device=device)


class Products(torch.autograd.Function):
    """The products, as if there were one expert, and nothing else."""

    @staticmethod
    def forward(ctx, x, gate_up, down, index, weight):
        rows = rows_like(index.numel(), x.shape[1], x.dtype, x.device)
        pre = rows @ gate_up[0].t()
        out = pre[:, : down.shape[2]] @ down[0].t()
        ctx.save_for_backward(pre, gate_up, down, index)
        return out[: len(x)]

    @staticmethod
    def backward(ctx, dout):
        pre, gate_up, down, index = ctx.saved_tensors
        rows = rows_like(index.numel(), dout.shape[1], dout.dtype, dout.device)
        act = rows @ down[0]
        ddown = torch.empty_like(down)
        torch.mm(rows.t(), act, out=ddown[0])
        dgate_up = torch.empty_like(gate_up)
        torch.mm(pre.t(), rows, out=dgate_up[0])
        dx = pre @ gate_up[0]
        return dx[: len(dout)], dgate_up, ddown, None, dout.new_empty(index.shape)


def three_gemms():
    return Products.apply


def liger_kernel():
    from liger_kernel.ops import LigerFusedMoEFunction

    return lambda x, gate_up, down, index, weight: LigerFusedMoEFunction.apply(
        x, gate_up, down, index.to(torch.int32), weight
    )


# Qwen3-30B-A3B at two lengths, OLMoE, Mixtral.
MODELS = {
    (16384, 2048, 768, 128, 8): (3200, 9500, 2100),
    (32768, 2048, 768, 128, 8): (6200, 18500, 3300),
    (16384, 2048, 1024, 64, 8): (3900, 11500, 2200),
    (8192, 4096, 14336, 8, 2): (11000, 31000, 3500),
}

OP = Op(
    dims=("tokens", "hidden", "inner", "experts", "choices"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    floor="three GEMMs",
    gradients=gradients,
    providers={"three GEMMs": three_gemms, "liger-kernel": liger_kernel},
    shapes={
        "quick-cpu": [(64, 128, 64, 8, 2)],
        "quick": [(1024, 512, 256, 16, 4), (4096, 2048, 768, 128, 8)],
        "full": [*MODELS, (4096, 2880, 2880, 32, 4), (1, 2048, 768, 128, 8), (128, 2048, 768, 128, 8)],
    },
    dtypes={"full": ("bfloat16",)},
    passes=("forward", "full"),
    checked=checked,
    anchors=tuple(
        Anchor(shape, "bfloat16", {"forward": forward, "full": full}, {"full": mib})
        for shape, (forward, full, mib) in MODELS.items()
    ),
)
