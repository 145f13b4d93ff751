"""fp8_projections(x: (tokens, n), three weights: (m, n)), with the casts of all operands"""

import torch
import torch.nn.functional as F

from benchmarks import fp8_linear
from benchmarks.op import Op

COUNT = 3


def inputs(make, tokens, n, m):
    weights = {f"weight_{i}": make.normal(m, n).mul_(n**-0.5) for i in range(COUNT)}
    return {"x": make.normal(tokens, n), **weights}


def traffic(size, tokens, n, m):
    once = (tokens * (n + COUNT * m) + COUNT * n * m) * size
    return once, 2 * once


def flops(tokens, n, m):
    return tuple(COUNT * each for each in fp8_linear.flops(tokens, n, m))


def formula(x, *weights):
    from liger_ops import functional

    return functional.fp8_projections.reference(x, weights, [])


def gemms():
    return lambda x, *weights: torch.cat([F.linear(x, weight) for weight in weights], -1)


def of(recipe):
    def ours():
        import liger_ops  # noqa: F401

        op = torch.ops.liger.fp8_projections.default
        return lambda x, *weights: op(x, weights, [], recipe=recipe)

    return ours


def separate():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.fp8_linear.default
    return lambda x, *weights: torch.cat([op(x, weight) for weight in weights], -1)


OP = Op(
    dims=("tokens", "n", "m"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    providers={
        "GEMMs": gemms,
        "ours": of("rows"),
        "ours one by one": separate,
        "ours tensor": of("tensor"),
        "ours blocks": of("blocks"),
    },
    unchecked=frozenset({"GEMMs", "ours one by one", "ours tensor", "ours blocks"}),
    # Of Llama-3-8B: gate and up are two of the second.
    shapes={
        "quick-cpu": [(64, 128, 256)],
        "quick": [(2048, 2048, 2048)],
        "full": [(8192, 4096, 2048), (8192, 4096, 14336)],
    },
    dtypes={"full": ("bfloat16",)},
)
