"""The lora_pieces kernel, in Triton's interpreter on CPU tensors."""

import torch
from interpreted import cases

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.linear.lora_linear as source
from interpreter import find

def run(path, rows, columns, parts, weight, keeps):
    torch.manual_seed(0)
    numbers = torch.randn(parts, columns, rows).mT
    # The rows of the outputs have a column between them.
    pieces = torch.full((4, rows, columns + 1), float("nan")).to(torch.bfloat16)
    total = torch.full((rows, columns + 1), float("nan"))
    variant = find("lora_pieces").pick({"WEIGHT": weight}, columns, False)
    count = rows * columns
    part, row, column = numbers.stride()
    variant.kernel.function[(-(-count // source.BLOCK.value),)](
        pieces, total, numbers, count, columns, parts, row, column, part, total.stride(0), pieces.stride(1),
        pieces.stride(0), 0.5, source.HAS_TOTAL.value if keeps else 0, WEIGHT=weight)
    numpy.savez(path, numbers=numbers.contiguous(), pieces=pieces.float(), total=total)
"""
# Rows, columns, parts, the order of pieces, whether the sum is kept. More than one block of 1024.
QUICK = [(5, 7, 1, 0, False), (40, 30, 3, 0, True), (40, 30, 3, 1, False)]


@cases(QUICK)
def test_kernel_interpreted(case, interpreted):
    *_, weight, keeps = case
    numbers, pieces, total = (interpreted[name] for name in ("numbers", "pieces", "total"))
    x = numbers[0]
    for part in numbers[1:]:
        x = x + part
    assert torch.equal(total[:, :-1], x) and total[:, -1].isnan().all() if keeps else total.isnan().all()
    low, high, middle, again = pieces[..., :-1][[0, 1, 2, 3] if weight else [3, 0, 2, 1]].double()
    assert torch.equal(high, again) and pieces[..., -1].isnan().all()
    # The interpreter casts to bf16 by truncation. Three pieces hold all digits in either case.
    x = 0.5 * x.double()
    assert torch.equal(high + middle + low, x)
    assert ((x - high).abs() <= 2**-7 * x.abs()).all() and (low.abs() <= 2**-14 * x.abs()).all()
