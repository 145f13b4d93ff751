"""fp8_linear(x: (tokens, n), weight: (m, n)), all recipes, with the casts of all operands"""

import torch
import torch.nn.functional as F

from benchmarks.op import Absent, Op


def inputs(make, tokens, n, m):
    return {"x": make.normal(tokens, n), "weight": make.normal(m, n).mul_(n**-0.5)}


def traffic(size, tokens, n, m):
    once = (tokens * (n + m) + n * m) * size
    return once, 2 * once


def flops(tokens, n, m):
    return 2 * tokens * n * m, 4 * tokens * n * m


def formula(x, weight):
    from liger_ops import functional

    return functional.fp8_linear.reference(x, weight)


def linear():
    return F.linear


def of(recipe):
    def ours():
        import liger_ops  # noqa: F401

        op = torch.ops.liger.fp8_linear.default
        return lambda x, weight: op(x, weight, recipe=recipe)

    return ours


def torchao(recipe):
    def make():
        try:
            from torchao.float8 import Float8LinearConfig
            from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
            from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
        except ImportError as error:
            raise Absent(str(error)) from None

        config = Float8LinearConfig.from_recipe_name(recipe)
        fast, exact = (ScaledMMConfig(False, fast, False, config.pad_inner_dim) for fast in (True, False))
        mm = LinearMMConfig(fast, fast, exact)
        return torch.compile(lambda x, weight: matmul_with_hp_or_float8_args.apply(x, weight.t(), mm, config))

    return make


OP = Op(
    dims=("tokens", "n", "m"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    flops=flops,
    providers={
        "GEMMs": linear,
        "ours": of("rows"),
        "ours rows_hp": of("rows_hp"),
        "ours tensor": of("tensor"),
        "ours blocks": of("blocks"),
        "torchao": torchao("rowwise"),
        "torchao rows_hp": torchao("rowwise_with_gw_hp"),
        "torchao tensor": torchao("tensorwise"),
    },
    unchecked=frozenset(
        {"GEMMs", "ours rows_hp", "ours tensor", "ours blocks", "torchao", "torchao rows_hp", "torchao tensor"}
    ),
    # Of Llama-3-8B: o, gate or up, down.
    shapes={
        "quick-cpu": [(64, 128, 256)],
        "quick": [(2048, 2048, 2048)],
        "full": [(8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096)],
    },
    dtypes={"full": ("bfloat16",)},
)
