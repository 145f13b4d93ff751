"""hyper_pre(streams: (tokens, 4, n), fn: (24, 4 n), base: (24,), scale: (3,))"""

import torch

from benchmarks.op import NO_SLOWER_THAN_EAGER, Anchor, Op


def inputs(make, tokens, n):
    return {
        "streams": make.normal(tokens, 4, n),
        "fn": make.normal(24, 4 * n) / (4 * n) ** 0.5,
        "base": make.normal(24),
        "scale": make.normal(3),
    }


def traffic(size, tokens, n):
    return (
        5 * tokens * n * size,
        14 * tokens * n * size,
    )  # streams in, x out; streams twice and dx twice in, dstreams out


def formula(streams, fn, base, scale):
    from liger_ops import functional as F

    return tuple(F.hyper_pre.reference(streams, fn, base, scale, 1e-6, 1e-6))


def ours():
    import liger_ops  # noqa: F401

    return lambda *tensors: torch.ops.liger.hyper_pre(*tensors, 1e-6, 1e-6)


# DeepSeek-V4's, and smaller ones.
SHAPES = {
    "quick-cpu": [(16, 64), (256, 512)],
    "quick": [(512, 4096), (8192, 4096)],
    "full": [(tokens, n) for tokens in (1024, 4096, 8192) for n in (2048, 4096, 7168)],
}

OP = Op(
    dims=("tokens", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"ours": ours},
    shapes=SHAPES,
    anchors=(Anchor((8192, 4096), "bfloat16", NO_SLOWER_THAN_EAGER),),
)
