"""quantize_rows(x: (rows, n)): e4m3 with one scale per row"""

import torch

from benchmarks.op import Absent, Op


def inputs(make, rows, n):
    return {"x": make.normal(rows, n)}


def traffic(size, rows, n):
    return rows * n * (size + 1) + 4 * rows, 0


def formula(x):
    from liger_ops import functional

    q, scale = functional.quantize_rows.reference(x)
    # Bits, because the harness compares numbers.
    return q.view(torch.uint8), scale


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.quantize_rows.default

    def call(x):
        q, scale = op(x)
        return q.view(torch.uint8), scale

    return call


def torchao():
    try:
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig
    except ImportError as error:
        raise Absent(str(error)) from None

    config = LinearMMConfig()
    granularity = ScalingGranularity.AXISWISE

    def call(x):
        found = hp_tensor_to_float8_dynamic(
            x, torch.float8_e4m3fn, config, scaling_granularity=granularity, axiswise_dim=-1
        )
        return found._data.view(torch.uint8), 1 / found._scale

    return torch.compile(call)


def copy():
    """Of as many bytes."""
    return lambda x: x.clone()


OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"ours": ours, "torchao": torchao, "copy": copy},
    # torchao rounds scale and quotient in another order.
    unchecked=frozenset({"copy", "torchao"}),
    constants=frozenset({"x"}),
    passes=("forward",),
    shapes={
        "quick-cpu": [(64, 256)],
        "quick": [(8192, 4096)],
        "full": [(8192, 4096), (8192, 14336), (8192, 5120), (8192, 11008), (16384, 2560)],
    },
    dtypes={"full": ("bfloat16",)},
)
