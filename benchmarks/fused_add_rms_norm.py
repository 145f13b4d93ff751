"""fused_add_rms_norm(x: (rows, n), residual: (rows, n), weight: (n,)) -> y, x + residual"""

import torch
import torch.nn.functional as F

from benchmarks import rms_norm
from benchmarks.norms import CPU_ANCHORS, EPS, HOST, SHAPES
from benchmarks.op import Op


def inputs(make, rows, n):
    return {"x": make.normal(rows, n), "residual": make.normal(rows, n), "weight": make.normal(n)}


def traffic(size, rows, n):
    # x and residual in, y and their sum out; the sum and both upstream gradients in, one gradient for both out
    return 4 * rows * n * size, 4 * rows * n * size


def formula(x, residual, weight):
    total = x + residual
    return rms_norm.formula(total, weight), total


def aten():
    def call(x, residual, weight):
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, EPS), total

    return call


def liger_kernel():
    from liger_kernel.ops import LigerFusedAddRMSNormFunction

    return lambda x, residual, weight: LigerFusedAddRMSNormFunction.apply(x, residual, weight, EPS)


def quack():
    from quack.rmsnorm import rmsnorm

    return lambda x, residual, weight: rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.fused_add_rms_norm
    return lambda x, residual, weight: op(x, residual, weight, EPS)


OP = Op(
    dims=("rows", "n"),
    inputs=inputs,
    formula=formula,
    traffic=traffic,
    providers={"torch": aten, "liger-kernel": liger_kernel, "quack": quack, "ours": ours},
    shapes=SHAPES,
    anchors=CPU_ANCHORS,
    host=HOST,
)
