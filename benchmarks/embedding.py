"""embedding(input: (rows,) indices, weight: (classes, n)) -> (rows, n)"""

import torch.nn.functional as F

from benchmarks.op import Host, Op, Relative

HOST_PASSES = ("no-grad", "grad", "fwd+bwd")


def inputs(make, rows, classes, n):
    return {"input": make.integers(classes, rows), "weight": make.normal(classes, n)}


def traffic(size, rows, classes, n):
    # Forward: rows in and out. Backward: upstream rows in, the whole gradient out.
    return 2 * rows * n * size, (rows + classes) * n * size


def formula(input, weight):
    return F.embedding(input, weight)


def aten():
    return F.embedding


def liger_kernel():
    from liger_kernel.ops import LigerEmbeddingFunction

    return lambda input, weight: LigerEmbeddingFunction.apply(weight, input)


OP = Op(
    dims=("rows", "classes", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"torch": aten, "liger-kernel": liger_kernel},
    shapes={
        "quick-cpu": [(16, 1000, 512), (2048, 32000, 512)],
        # Large: on CUDA, few indices take ATen's path.
        "quick": [(4096, 32000, 4096), (16384, 32000, 1024)],
        # Llama 2 and 3 8B, Qwen2 7B and 0.5B.
        "full": [
            (rows, classes, n)
            for rows in (4096, 16384, 65536)
            for classes, n in ((32000, 4096), (128256, 4096), (152064, 3584), (151936, 896))
        ],
    },
    host={"cpu": Host((4, 100, 64), "float32", dict.fromkeys(HOST_PASSES, Relative(1.4, ("torch",))))},
)
