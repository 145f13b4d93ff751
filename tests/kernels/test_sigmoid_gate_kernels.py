"""The sigmoid_gate kernels, in Triton's interpreter on CPU tensors."""

from checks import check_results
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.gated.sigmoid_gate
from interpreter import find

def run(path, n, aligned, per_row):
    torch.manual_seed(0)
    # Rows in two levels: 2 blocks of 4, the last one partial.
    rows, inner = 7, 4
    wide, residual, dy = torch.randn(rows, 2 * n), torch.randn(rows, n), torch.randn(rows, n)
    x, kept = wide[:, n:], dy.clone()
    gate = torch.randn(rows, 1 if per_row else n)
    y, dgate = torch.full((rows, n), float("nan")), torch.full_like(gate, float("nan"))
    strided, plain = (inner * 2 * n, 2 * n), (inner * n, n)
    point = {"X": "fp32", "A": "fp32", "PER_ROW": per_row}
    none = torch.full((1,), float("nan"))
    full, numbers = (none, gate) if per_row else (gate, none)
    dfull, dnumbers = (none, dgate) if per_row else (dgate, none)
    forward, backward = (find("sigmoid_gate_" + k).pick(point, n, aligned) for k in ("fwd", "bwd"))
    for variant, tensors, strides, flags in (
            (forward, (y, x, full, numbers, residual), (*plain, *strided, *plain, *plain), 1),
            (backward, (dy, dfull, dnumbers, dy, x, full, numbers), (*plain, *plain, *plain, *strided, *plain), 6)):
        c = variant.config.constexprs
        variant.kernel.function[(-(-rows // c["BLOCK_M"]),)](
            *tensors, rows, n, inner, *strides, flags, PER_ROW=per_row, **c)
    numpy.savez(path, x=x.contiguous(), gate=gate, residual=residual, y=y, dy=kept, dx=dy, dgate=dgate)
"""
QUICK = [(64, True, 0), (200, True, 1), (1032, True, 0), (2056, True, 1), (5, False, 1), (1030, False, 0)]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    inputs = [got["x"].requires_grad_(), got["gate"].requires_grad_(), got["residual"]]
    check_results([got["y"], got["dx"], got["dgate"]], F.sigmoid_gate.reference, inputs, [got["dy"]])
