"""relu_squared(x: (rows, n))"""

import torch.nn.functional as F

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op


def inputs(make, rows, n):
    return {"x": make.normal(rows, n)}


def traffic(size, rows, n):
    return 2 * rows * n * size, 3 * rows * n * size  # x in, y out; dy and x in, dx out


def formula(x):
    return F.relu(x).square()


def liger_kernel():
    from liger_kernel.ops import LigerReLUSquaredFunction

    return LigerReLUSquaredFunction.apply


OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"liger-kernel": liger_kernel},
    # Intermediate sizes of Nemotron-4 and Minitron.
    shapes={
        "quick-cpu": [(16, 512), (2048, 2816)],
        "quick": [(16, 1024), (2048, 9216), (8192, 16384)],
        "full": [(rows, n) for rows in (16, 1024, 4096, 16384) for n in (1024, 9216, 16384, 24576)],
    },
    # A model drops the projection, so the gradient may reuse its memory.
    transient=frozenset({"x"}),
    anchors=(
        Anchor((8192, 16384), "bfloat16", NO_SLOWER_THAN_EAGER),
        Anchor((2048, 4096), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
)
