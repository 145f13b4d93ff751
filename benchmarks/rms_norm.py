"""rms_norm(x: (rows, n), weight: (n,))"""

import torch
import torch.nn.functional as F

from benchmarks.norms import CPU_ANCHORS, EPS, HOST, SHAPES
from benchmarks.op import Anchor, Op


def inputs(make, rows, n):
    return {"x": make.normal(rows, n), "weight": make.normal(n)}


def traffic(size, rows, n):
    return 2 * rows * n * size, 3 * rows * n * size  # x in, y out; x and dy in, dx out


def formula(x, weight):
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * h.to(x.dtype)


def aten():
    return lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)


def liger_kernel():
    from liger_kernel.ops import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def liger_sm90():
    from liger_kernel.ops.cutedsl.ops.rms_norm import LigerRMSNormFunction

    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


def quack():
    from quack.rmsnorm import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.rms_norm
    return lambda x, weight: op(x, weight, EPS)


OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={
        "torch": aten,
        "liger-kernel": liger_kernel,
        "liger-sm90": liger_sm90,
        "quack": quack,
        "ours": ours,
    },
    shapes=SHAPES,
    anchors=(
        Anchor((32768, 4096), "bfloat16", {"forward": 133, "full": 345}),
        Anchor((8192, 16384), "bfloat16", {"forward": 133, "full": 350}),
        Anchor((8192, 4096), "bfloat16", {"forward": 38, "full": 115}),
        Anchor((16384, 1024), "bfloat16", {"forward": 22, "full": 100}),
        *CPU_ANCHORS,
    ),
    host=HOST,
    cold_start=("torch", "liger-kernel", "ours", "ours JIT"),
    cold_start_must={"cuda": 0.15},
)
