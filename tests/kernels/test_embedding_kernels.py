"""The embedding kernel, in Triton's interpreter on CPU tensors."""

import torch
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.embedding.embedding
from interpreter import find

def run(path, rows, classes, columns, padding_idx):
    torch.manual_seed(0)
    input = torch.randint(classes, (rows,))
    dout, dweight = torch.randn(rows, columns + 8).half()[:, :columns], torch.zeros(classes, columns).half()
    dout[1, 0], dout[5, 1] = float("inf"), float("-inf")
    indices, order = input.int().sort(stable=True)
    kernel = find("embedding_bwd")
    c = kernel.pick({"X": "fp16"}, columns, columns % 8 == 0).constexprs
    grid = (rows * -(-columns // c["BLOCK_N"]),)
    kernel.function[grid](dweight, dout, indices, order, rows, columns, columns + 8, padding_idx, **c)
    numpy.savez(path, input=input, dout=dout, dweight=dweight)
"""
QUICK = [(9, 20, 8, -1), (70, 3, 1032, 2), (40, 1, 300, -1), (33, 5, 5, 0)]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    _, classes, columns, padding_idx = case
    got = interpreted
    expected = torch.zeros(classes, columns, dtype=torch.float64)
    expected.index_add_(0, got["input"], got["dout"].double())
    if padding_idx >= 0:
        expected[padding_idx] = 0
    torch.testing.assert_close(got["dweight"].double(), expected, rtol=torch.finfo(torch.half).eps, atol=1e-6)
