"""The kernels of swiglu and geglu, in Triton's interpreter on CPU tensors."""

import torch
from checks import assert_as_the_formula
from interpreted import cases

from liger_ops import functional as F

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.gated.geglu
from interpreter import find
from liger_ops.kernels.gated.swiglu import PRODUCT

def run(path, stem, number, n, aligned):
    torch.manual_seed(0)
    # Rows in two levels: 2 blocks of 4, the last one partial.
    rows, inner = 7, 4
    forward, backward = (find(f"{stem}_{k}").pick({"X": "fp32"}, n, aligned) for k in ("fwd", "bwd"))
    gate_up, dout, out = torch.randn(rows, 2 * n), torch.randn(rows, n), torch.full((rows, n), float("nan"))
    gate, up = gate_up[:, :n], gate_up[:, n:]
    kept = dict(gate=gate.clone(), up=up.clone(), dout=dout.clone())
    packed, plain = (inner * 2 * n, 2 * n), (inner * n, n)
    def grid(c):
        return (-(-rows // c["BLOCK_M"]) * -(-n // c["BLOCK_N"]),)
    if stem == "swiglu":
        flags, number = 0, float("inf") if number is None else number
        limits = [number]
    else:
        flags, limits = number, []
    c = forward.config.constexprs
    forward.kernel.function[grid(c)](out, gate, up, rows, n, inner, *plain, *packed, *packed, number, **c)
    c = backward.config.constexprs
    backward.kernel.function[grid(c)](
        gate, up, dout, dout, gate, up, rows, n, inner, *packed, *packed, *plain, *packed, *packed,
        flags | PRODUCT.value, *limits, **c)
    saved = dict(**kept, out=out, product=dout, dgate=gate, dup=up)
    numpy.savez(path, **{name: t.contiguous().numpy() for name, t in saved.items()})
"""
# The number is the limit of swiglu, or holds the flags of geglu.
FORMULAS = {
    ("swiglu", None): F.swiglu.reference,
    ("swiglu", 0.7): lambda gate, up: F.swiglu.reference(gate, up, 0.7),
    ("geglu", 1): lambda gate, up: F.geglu.reference(gate, up, "tanh"),
    ("geglu", 0): lambda gate, up: F.geglu.reference(gate, up, "none"),
}
SIZES = [(40, True), (200, True), (1000, True), (2056, True), (60, False), (1100, False)]
QUICK = [(*formula, *size) for formula in FORMULAS for size in SIZES]


@cases(QUICK)
def test_kernels_interpreted(case, interpreted):
    """Gate and up are halves of one tensor, and gradients overwrite them."""

    def results(gate, up, dout):
        out = FORMULAS[case[:2]](gate, up)
        dgate, dup = torch.autograd.grad(out, [gate, up], dout)
        return dict(out=out, dgate=dgate, dup=dup, product=out)

    ours = [(name, interpreted[name]) for name in ("out", "dgate", "dup", "product")]
    assert_as_the_formula(ours, results, [interpreted[name] for name in ("gate", "up", "dout")])
