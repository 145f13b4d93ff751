"""lora_linear(x: (tokens, n), weight: (m, n), one fp32 adapter of rank r), with frozen weights as peft trains them"""

import torch
import torch.nn.functional as F

from benchmarks.op import Op

SCALE = 2.0


def inputs(make, tokens, n, m, r):
    return {
        "x": make.normal(tokens, n),
        "weight": make.normal(m, n).mul_(n**-0.5),
        "a": make.normal(r, n).mul_(n**-0.5).float(),
        "b": make.normal(m, r).mul_(r**-0.5).float(),
    }


def traffic(size, tokens, n, m, r):
    once = (tokens * (n + m) + n * m) * size
    return once, once + tokens * n * size  # x for the gradient of a


def flops(tokens, n, m, r):
    gemm, adapter = 2 * tokens * n * m, 2 * tokens * r * (n + m)
    return gemm + adapter, gemm + 2 * adapter


def formula(x, weight, a, b):
    y = F.linear(x, weight)
    return (y + F.linear(F.linear(x.to(a.dtype), a), b) * SCALE).to(y.dtype)


def frozen():
    return lambda x, weight, a, b: F.linear(x, weight)


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.lora_linear.default
    return lambda x, weight, a, b: op(x, weight, [a], [b], [SCALE])


OP = Op(
    dims=("tokens", "n", "m", "r"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    providers={"GEMMs": frozen, "ours": ours},
    floor="GEMMs",
    unchecked=frozenset({"GEMMs"}),
    constants=frozenset({"weight"}),
    # Of Llama-3-8B: o, gate or up, down.
    shapes={
        "quick-cpu": [(64, 64, 96, 8)],
        "quick": [(2048, 2048, 2048, 16)],
        "full": [(8192, 4096, 4096, 16), (8192, 4096, 14336, 16), (8192, 14336, 4096, 16), (8192, 4096, 4096, 64)],
    },
    dtypes={"full": ("bfloat16",)},
)
