"""The column_sum kernel, in Triton's interpreter on CPU tensors."""

import torch
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.norms.column_sum
from interpreter import find

def run(path, outputs, rows, n, aligned):
    torch.manual_seed(0)
    partial, nothing = torch.randn(outputs, rows, n), float("nan")
    out = torch.full((outputs, n), nothing)
    variant = find("column_sum").pick({"W": "fp32"}, n, aligned)
    c = variant.config.constexprs
    grid = (-(-n // c["BLOCK_N"]), outputs)
    variant.kernel.function[grid](out[0], out[-1], partial, rows, n, **c)
    numpy.savez(path, partial=partial, out=out)
"""
# One block of rows, several with a partial one, and columns that do not fill theirs.
QUICK = [(1, 3, 24, True), (2, 130, 40, True), (2, 65, 5, False)]


@cases(QUICK)
def test_kernel_interpreted(case, interpreted):
    expected = interpreted["partial"].double().sum(1)
    # fp32 sums of at most 130 numbers.
    bound = 130 * torch.finfo(torch.float32).eps * interpreted["partial"].double().abs().sum(1)
    assert ((interpreted["out"] - expected).abs() <= bound).all()
