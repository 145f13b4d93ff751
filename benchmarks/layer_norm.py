"""layer_norm(x: (rows, n), weight: (n,), bias: (n,))"""

import torch
import torch.nn.functional as F

from benchmarks.norms import CPU_ANCHORS, EPS, HOST, SHAPES
from benchmarks.op import Absent, Anchor, Op


def inputs(make, rows, n):
    return {"x": make.normal(rows, n), "weight": make.normal(n), "bias": make.normal(n)}


def traffic(size, rows, n):
    return 2 * rows * n * size, 3 * rows * n * size  # x in, y out; x and dy in, dx out


def formula(x, weight, bias):
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight * h + bias).to(x.dtype)


def aten():
    return lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS)


def liger_kernel():
    from liger_kernel.ops import LigerLayerNormFunction

    return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)


def quack():
    raise Absent("has no differentiable layer_norm")


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.layer_norm
    return lambda x, weight, bias: op(x, weight, bias, EPS)


OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"torch": aten, "liger-kernel": liger_kernel, "quack": quack, "ours": ours},
    shapes=SHAPES,
    anchors=(
        Anchor((8192, 4096), "bfloat16", {"forward": 40, "full": 125}),
        Anchor((8192, 16384), "bfloat16", {"forward": 140, "full": 360}),
        *CPU_ANCHORS,
    ),
    host=HOST,
)
