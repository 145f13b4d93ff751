"""delta_gates(a: (rows, heads, channels), b: (rows, heads), a_log: (heads), dt_bias: (heads, channels))"""

import torch.nn.functional as F

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op


def inputs(make, rows, heads, channels):
    parameters = {"a_log": make.normal(heads), "dt_bias": make.normal(heads, channels)}
    return {"a": make.normal(rows, heads, channels), "b": make.normal(rows, heads), **parameters}


def traffic(size, rows, heads, channels):
    """g and its gradient are fp32."""
    of_a, of_b = rows * heads * channels, rows * heads
    return (size + 4) * of_a + 2 * size * of_b, (2 * size + 4) * of_a + 3 * size * of_b


def formula(a, b, a_log, dt_bias):
    return -a_log.float().exp()[:, None] * F.softplus(a.float() + dt_bias), b.sigmoid()


OP = Op(
    dims=("rows", "heads", "channels"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    # Qwen3-Next: 32 heads; Kimi Linear: 32 heads of 128 channels.
    shapes={
        "quick-cpu": [(64, 4, 8), (1024, 32, 1)],
        "quick": [(8192, 32, 1), (8192, 32, 128)],
        "full": [
            (rows, heads, channels) for rows in (1024, 8192, 32_768) for heads in (32, 64) for channels in (1, 128)
        ],
    },
    anchors=(
        Anchor((8192, 32, 128), "bfloat16", NO_SLOWER_THAN_EAGER),
        Anchor((1024, 32, 1), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
)
