"""The embedding kernel, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.embedding.embedding
from interpreter import find

def run(path, rows, classes, columns, padding_idx, dtype="fp16"):
    torch.manual_seed(0)
    of = {"fp16": torch.half, "fp32": torch.float}[dtype]
    input = torch.randint(classes, (rows,))
    dout, dweight = torch.randn(rows, columns + 8).abs().to(of)[:, :columns], torch.zeros(classes, columns).to(of)
    dout[1, 0], dout[5, 1] = float("inf"), float("-inf")
    indices, order = input.int().sort(stable=True)
    kernel = find("embedding_bwd")
    c = kernel.pick({"X": dtype}, columns, columns % 8 == 0).constexprs
    grid = (rows * -(-columns // c["BLOCK_N"]),)
    kernel.function[grid](dweight, dout, indices, order, rows, columns, columns + 8, padding_idx, **c)
    numpy.savez(path, input=input, dout=dout, dweight=dweight)
"""
# The last one has too many rows per class for a plain sum in fp32.
QUICK = [(9, 20, 8, -1), (70, 3, 1032, 2), (40, 1, 300, -1), (33, 5, 5, 0), (1500, 1, 5, -1, "fp32")]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    (_, classes, columns, padding_idx, *_), got = case, interpreted

    def results(dout):
        dweight = torch.zeros(classes, columns, dtype=dout.dtype).index_add(0, got["input"], dout)
        if padding_idx >= 0:
            dweight[padding_idx] = 0
        return dweight

    # Infinite elements stay infinite, and make no others so.
    expected = results(got["dout"].double())
    finite = expected.isfinite()
    assert torch.equal(got["dweight"][~finite].double(), expected[~finite])
    ours = [("dweight", got["dweight"][finite])]
    assert_as_the_formula(ours, lambda dout: dict(dweight=results(dout)[finite]), [got["dout"]])
