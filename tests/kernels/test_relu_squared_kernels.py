"""The relu_squared kernels, in Triton's interpreter on CPU tensors."""

import torch
from interpreted import cases

from liger_ops import functional as F

reference = F.relu_squared.reference

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.activations.relu_squared
from interpreter import find

def run(path, n, aligned):
    torch.manual_seed(0)
    # Rows in two levels: 2 blocks of 4, the last one partial.
    rows, inner = 7, 4
    wide, y, dy = torch.randn(rows, 2 * n), torch.full((rows, n), float("nan")), torch.randn(rows, n)
    x, kept = wide[:, n:], dy.clone()
    strided, plain = (inner * 2 * n, 2 * n), (inner * n, n)
    forward, backward = (find("relu_squared_" + k).pick({"X": "fp32"}, n, aligned) for k in ("fwd", "bwd"))
    for variant, tensors, strides in ((forward, (y, x), (*plain, *strided)),
                                      (backward, (dy, dy, x), (*plain, *plain, *strided))):
        c = variant.config.constexprs
        grid = (-(-rows // c["BLOCK_M"]) * -(-n // c["BLOCK_N"]),)
        variant.kernel.function[grid](*tensors, rows, n, inner, *strides, **c)
    numpy.savez(path, x=x.contiguous(), y=y, dy=kept, dx=dy)
"""
QUICK = [(64, True), (200, True), (1032, True), (5, False), (1030, False)]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    x = got["x"].requires_grad_()
    y = reference(x)
    assert torch.equal(got["y"], y) and torch.equal(got["dx"], *torch.autograd.grad(y, x, got["dy"]))
