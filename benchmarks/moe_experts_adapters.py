"""moe_experts with fp32 adapters of rank r on both weights of every expert, as peft stores them, and frozen weights"""

import torch

from benchmarks import moe_experts
from benchmarks.op import Anchor, Op, Relative

SCALE = 2.0
ADAPTERS = ("gate_up_a", "gate_up_b", "down_a", "down_b")


def inputs(make, tokens, hidden, inner, experts, choices, r):
    found = moe_experts.inputs(make, tokens, hidden, inner, experts, choices)
    sizes = {
        "gate_up_a": (r * experts, hidden), "gate_up_b": (2 * inner, r * experts),
        "down_a": (r * experts, inner), "down_b": (hidden, r * experts),
    }  # fmt: skip
    depths = dict(zip(ADAPTERS, (hidden, r, inner, r)))
    return found | {name: make.normal(*size).mul_(depths[name] ** -0.5).float() for name, size in sizes.items()}


def traffic(size, tokens, hidden, inner, experts, choices, r):
    forward, backward = moe_experts.traffic(size, tokens, hidden, inner, experts, choices)
    adapters = 4 * r * experts * (2 * hidden + 3 * inner)
    return forward + adapters, backward - 3 * experts * hidden * inner * size + 2 * adapters


def flops(tokens, hidden, inner, experts, choices, r):
    products, _ = moe_experts.flops(tokens, hidden, inner, experts, choices)
    adapters = 2 * tokens * choices * r * (2 * hidden + 3 * inner)
    return products + adapters, products + 2 * adapters


def gradients(size, tokens, hidden, inner, experts, choices, r):
    return (tokens * hidden + tokens * choices) * size + 4 * r * experts * (2 * hidden + 3 * inner)


def checked(tokens, hidden, inner, experts, choices, r):
    return *moe_experts.checked(tokens, hidden, inner, experts, choices), r


def views(experts, gate_up_a, gate_up_b, down_a, down_b):
    """(E, r, in) and (E, out, r)"""
    a, b = (t.view(experts, -1, t.shape[1]) for t in (gate_up_a, down_a)), (gate_up_b, down_b)
    b = (t.view(t.shape[0], -1, experts).permute(2, 0, 1) for t in b)
    return list(zip(a, b))


def formula(x, gate_up, down, index, weight, *adapters):
    """What peft's ParamWrapper computes."""
    merged = (
        torch.baddbmm(w, b.to(w.dtype), a.to(w.dtype), alpha=SCALE)
        for w, (a, b) in zip((gate_up, down), views(len(gate_up), *adapters))
    )
    return moe_experts.formula(x, *merged, index, weight)


def frozen():
    op = moe_experts.ours()
    return lambda x, gate_up, down, index, weight, *adapters: op(x, gate_up, down, index, weight)


def ours():
    op = moe_experts.ours()

    def run(x, gate_up, down, index, weight, *adapters):
        pairs = views(len(gate_up), *adapters)
        named = dict(zip(ADAPTERS, (t for pair in pairs for t in pair)))
        return op(x, gate_up, down, index, weight, **named, gate_up_scale=SCALE, down_scale=SCALE)

    return run


QWEN = (16384, 2048, 768, 128, 8, 16)  # Qwen3-30B-A3B
NEAR_FROZEN = Relative(1.15, ("frozen",))

OP = Op(
    dims=("tokens", "hidden", "inner", "experts", "choices", "r"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    gradients=gradients,
    providers={"frozen": frozen, "ours": ours},
    floor="frozen",
    unchecked=frozenset({"frozen"}),
    constants=frozenset({"gate_up", "down"}),
    shapes={
        "quick-cpu": [(64, 128, 64, 8, 2, 8)],
        "quick": [(1024, 512, 256, 16, 4, 16)],
        "full": [QWEN, (4096, 2880, 2880, 32, 4, 16), (8192, 4096, 14336, 8, 2, 16)],
    },
    dtypes={"full": ("bfloat16",)},
    passes=("forward", "full"),
    checked=checked,
    anchors=(Anchor(QWEN, "bfloat16", {"forward": NEAR_FROZEN, "full": NEAR_FROZEN}),),
)
