"""fused_linear_cross_entropy(input: (tokens, hidden), weight: (classes, hidden), target: (tokens,)) of a frozen head with an
fp32 adapter of rank r. hf: the logits of a LoRA layer of peft. frozen head: ours without the adapter."""

import torch
import torch.nn.functional as F

from benchmarks import fused_linear_cross_entropy as plain
from benchmarks.op import Op

SCALE = 2.0


def inputs(make, tokens, hidden, classes, r):
    return {
        **plain.inputs(make, tokens, hidden, classes),
        "a": make.normal(r, hidden).mul_(hidden**-0.5).float(),
        # Adapters change logits by less than the logits are.
        "b": make.normal(classes, r).mul_(0.2 * r**-0.5).float(),
    }


def traffic(size, tokens, hidden, classes, r):
    read = (tokens + classes) * hidden * size + (hidden + classes) * r * 4
    return read, read + tokens * hidden * size + (hidden + classes) * r * 4  # gradients of input, a and b


def flops(tokens, hidden, classes, r):
    gemm, adapter = 2 * tokens * hidden * classes, 2 * tokens * r * (hidden + classes)
    return gemm + adapter, gemm + 2 * adapter


def gradients(size, tokens, hidden, classes, r):
    return tokens * hidden * size + (hidden + classes) * r * 4


def checked(tokens, hidden, classes, r):
    return *plain.checked(tokens, hidden, classes), r


def formula(input, weight, target, a, b):
    logits = F.linear(input, weight)
    logits = (logits + F.linear(F.linear(input.to(a.dtype), a), b) * SCALE).to(logits.dtype)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def frozen():
    op = plain.ours()
    return lambda input, weight, target, a, b: op(input, weight, target)


def ours_within(budget):
    def load():
        from liger_ops.linear.adapters import low_rank_input

        op = plain.ours()

        def run(input, weight, target, a, b):
            t = low_rank_input(input, [a], [SCALE])
            return op(input, weight, target, memory_budget=budget, low_rank_input=t, low_rank_weight=b)

        return run

    return load


OP = Op(
    dims=("tokens", "hidden", "classes", "r"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    gradients=gradients,
    providers={
        "frozen head": frozen,
        "ours": ours_within(None),
        "ours compact": ours_within(plain.COMPACT),
    },
    floor="frozen head",
    unchecked=frozenset({"frozen head"}),
    passes=("forward", "full"),
    checked=checked,
    averaged=lambda tokens, hidden, classes, r: tokens,
    constants=frozenset({"weight", "target"}),
    shapes={
        "quick-cpu": [(256, 512, 16000, 8)],
        "quick": [(2048, 2048, 32000, 16)],
        "full": [(4096, 4096, 128256, 16), (8192, 4096, 128256, 16), (8192, 4096, 128256, 64)],
    },
    dtypes={"full": ("bfloat16",)},
)
