"""The xielu kernels, in Triton's interpreter on CPU tensors."""

import torch
from checks import check_results
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.activations.xielu
from interpreter import find

def run(path, n, aligned):
    torch.manual_seed(0)
    # Rows in two levels: 2 blocks of 4, the last one partial. Fewer programs than tiles.
    rows, inner, programs = 7, 4, 2
    wide, y, dy = torch.randn(rows, 2 * n), torch.full((rows, n), float("nan")), torch.randn(rows, n)
    x, kept = 3 * wide[:, n:], dy.clone()
    x[0, 0], partial = 0.0, torch.full((2, programs), float("nan"))
    wide, numbers = aligned, (torch.tensor([0.2]), torch.tensor([-1.1]))
    given = (*[torch.full((1,), float("nan"))] * 2, *numbers) if wide else (*numbers, *[torch.full((1,), float("nan"))] * 2)
    flags = 4 if wide else 0
    plain = inner * n, n
    forward, backward = (find("xielu_" + k).pick({"X": "fp32", "A": "fp32"}, n, aligned) for k in ("fwd", "bwd"))
    c = forward.config.constexprs
    grid = (-(-rows // c["BLOCK_M"]) * -(-n // c["BLOCK_N"]),)
    forward.kernel.function[grid](y, x, *given, rows, n, inner, *plain, *plain, 0.5, -1e-6, flags, **c)
    backward.kernel.function[(programs,)](
        dy, partial, dy, x, *given, rows, n, inner, *plain, *plain, *plain, 0.5, -1e-6, 3 | flags,
        **backward.config.constexprs)
    numpy.savez(path, x=x, y=y, dy=kept, dx=dy, sums=partial)
"""
QUICK = [(64, True), (200, True), (1032, True), (5, False), (1030, False)]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    inputs = [t.requires_grad_() for t in (got["x"], torch.tensor([0.2]), torch.tensor([-1.1]))]
    check_results([got["y"], got["dx"], *got["sums"].sum(1, keepdim=True)], F.xielu.reference, inputs, [got["dy"]])
