"""hyper_pre(streams: (tokens, 4, n), fn: (24, 4 n), base: (24,), scale: (3,))

"liger-kernel" is its mHC, which keeps every step of Sinkhorn's for backward.
"""

import torch

from benchmarks.op import Anchor, Op, Relative


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


def liger():
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_pre

    def call(streams, fn, base, scale):
        pre, post, comb = liger_mhc_coeffs(
            streams, fn.t(), base, *scale.unbind(), pre_eps=1e-6, allow_fp32=streams.dtype == torch.float32
        )
        return liger_mhc_pre(streams, pre).to(streams.dtype), post, comb

    return call


NO_SLOWER = dict.fromkeys(("forward", "full"), Relative(1.0, ("hf", "liger-kernel")))

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
    providers={"liger-kernel": liger, "ours": ours},
    shapes=SHAPES,
    anchors=(Anchor((8192, 4096), "bfloat16", NO_SLOWER),),
)
