"""Projections of one x: (tokens, n) with frozen weights and an fp32 adapter of rank r each, as liger_ops.transformers fuses
peft's layers: q, k and v, gate and up, or a layer alone. m1, m2, m3: their features, 0 for none."""

import torch.nn.functional as F

from benchmarks.op import Op

SCALE = 2.0


def inputs(make, tokens, n, *features_and_rank):
    *features, r = features_and_rank
    found = {"x": make.normal(tokens, n)}
    for i, m in enumerate(filter(None, features)):
        found[f"weight{i}"] = make.normal(m, n).mul_(n**-0.5)
        found[f"a{i}"] = make.normal(r, n).mul_(n**-0.5).float()
        found[f"b{i}"] = make.normal(m, r).mul_(r**-0.5).float()
    return found


def traffic(size, tokens, n, *features_and_rank):
    m = sum(features_and_rank[:-1])
    once = (tokens * (n + m) + n * m) * size
    return once, once + tokens * n * size  # x for the gradients of a


def flops(tokens, n, *features_and_rank):
    *features, r = features_and_rank
    gemm = 2 * tokens * n * sum(features)
    adapters = sum(2 * tokens * r * (n + m) for m in features if m)
    return gemm + adapters, gemm + 2 * adapters


def grouped(arguments):
    """(weight, a, b) of each projection."""
    return [arguments[i : i + 3] for i in range(0, len(arguments), 3)]


def formula(x, *arguments):
    ys = []
    for weight, a, b in grouped(arguments):
        y = F.linear(x, weight)
        ys.append((y + F.linear(F.linear(x.to(a.dtype), a), b) * SCALE).to(y.dtype))
    return tuple(ys)


def frozen():
    return lambda x, *arguments: tuple(F.linear(x, weight) for weight, _, _ in grouped(arguments))


def ours():
    from liger_ops.linear.adapters import lora_projections

    def run(x, *arguments):
        weights, a, b = zip(*grouped(arguments))
        count = len(weights)
        return lora_projections(x, weights, [None] * count, a, b, [SCALE] * count, range(count))

    return run


OP = Op(
    dims=("tokens", "n", "m1", "m2", "m3", "r"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    providers={"GEMMs": frozen, "ours": ours},
    floor="GEMMs",
    unchecked=frozenset({"GEMMs"}),
    constants=frozenset({"weight0", "weight1", "weight2"}),
    # Of Llama-3-8B: q, k and v; o; gate and up; down.
    shapes={
        "quick-cpu": [(64, 64, 96, 32, 32, 8)],
        "quick": [(2048, 2048, 2048, 512, 512, 16)],
        "full": [
            (8192, 4096, 4096, 1024, 1024, 16),
            (8192, 4096, 4096, 0, 0, 16),
            (8192, 4096, 14336, 14336, 0, 16),
            (8192, 14336, 4096, 0, 0, 16),
        ],
    },
    dtypes={"full": ("bfloat16",)},
)
