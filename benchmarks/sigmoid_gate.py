"""sigmoid_gate(x: (rows, n), gate: (rows, n))"""

import torch

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op


def inputs(make, rows, n):
    return {"x": make.normal(rows, n), "gate": make.normal(rows, n)}


def traffic(size, rows, n):
    return 3 * rows * n * size, 5 * rows * n * size  # x and gate in, out; dout, x and gate in, dx and dgate out


def formula(x, gate):
    return x * torch.sigmoid(gate)


OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    # Qwen3-Next's attention: 16 heads of 256.
    shapes={
        "quick-cpu": [(16, 512), (2048, 2816)],
        "quick": [(16, 1024), (2048, 4096), (8192, 4096)],
        "full": [(rows, n) for rows in (16, 1024, 4096, 16384) for n in (1024, 4096, 8192)],
    },
    # A model drops attention's output, so the gradient may reuse its memory.
    transient=frozenset({"x"}),
    anchors=(
        Anchor((8192, 4096), "bfloat16", NO_SLOWER_THAN_EAGER),
        Anchor((2048, 4096), "float32", NO_SLOWER_THAN_EAGER, device="cpu"),
    ),
)
