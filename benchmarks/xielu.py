"""xielu(x: (rows, n))"""

import torch
import torch.nn.functional as F

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op


def inputs(make, rows, n):
    return {"x": make.normal(rows, n), "alpha_p": make.normal(1), "alpha_n": make.normal(1)}


def traffic(size, rows, n):
    return 2 * rows * n * size, 3 * rows * n * size  # x in, y out; dy and x in, dx out


def formula(x, alpha_p, alpha_n):
    p, m = F.softplus(alpha_p), 0.5 + F.softplus(alpha_n)
    return torch.where(x > 0, p * x * x + 0.5 * x, (torch.expm1(x.clamp(max=-1e-6)) - x) * m + 0.5 * x)


OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    # Intermediate sizes of Apertus-8B and 70B.
    shapes={
        "quick-cpu": [(16, 512), (2048, 2816)],
        "quick": [(16, 1024), (2048, 21504), (8192, 21504)],
        "full": [(rows, n) for rows in (16, 1024, 4096, 8192) for n in (1024, 8192, 21504, 43008)],
    },
    # A model drops the projection, so the gradient may reuse its memory.
    transient=frozenset({"x"}),
    anchors=(
        Anchor((8192, 21504), "bfloat16", NO_SLOWER_THAN_EAGER),
        Anchor((2048, 4096), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
)
