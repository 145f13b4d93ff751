"""The quantize_rows kernels, in Triton's interpreter on CPU tensors. It has no instruction that converts to e4m3, so that
all configs run with integer arithmetic here."""

import random
import re
import struct
from fractions import Fraction

import pytest
import torch
from interpreted import cases

import liger_ops.kernels as tables
from liger_ops import functional as F
from liger_ops.aot.compile import compile_variant
from liger_ops.kernels.quantize.quantize_rows import OVER_448

INTERPRETED = """
import torch, numpy
import liger_ops.kernels.quantize.quantize_rows
from interpreter import find

def run(path, dtype, n, aligned, kernel):
    torch.manual_seed(0)
    # Rows in two levels: blocks of 4, the last one partial.
    rows, inner, programs = 43, 4, 3
    wide = torch.randn(rows, 2 * n) * 10.0 ** torch.randint(-3, 3, (rows, 1))
    x = wide.to(dict(fp16=torch.float16, fp32=torch.float32)[dtype])[:, n:]
    x[3], x[:, 1], x[7, 2], x[9, 3] = 0, 0, float("nan"), float("inf")
    x[11, :9] = torch.tensor([1.0, 2**-7, 2**-8, 2**-9, 2**-10, 3 * 2**-10, 5 * 2**-10, -(2**-11), -0.0]) * (448 if n > 9 else 1)
    strides = (inner * 2 * n, 2 * n)
    # The transposed copy is between others.
    before, pitch = 8, rows + 21
    q, wider = (torch.full(shape, 0x55, dtype=torch.uint8) for shape in ((rows, n), (n, pitch)))
    scale, scale_t = (torch.full((count,), -1.0) for count in (rows, n))
    def launch(name, columns, grid, *arguments):
        choices = dict(X=dtype, HARDWARE=int(name.endswith("_e4m3"))) | columns
        v = find(name).pick(choices if "HARDWARE" in find(name).axis_points[0] else dict(X=dtype), n, aligned)
        options = {k: 0 if k == "HARDWARE" else o for k, o in v.constexprs.items()}
        v.kernel.function[grid(options)](*arguments, **options)
        return options
    blocks = lambda o: -(-rows // o["BLOCK_M"])
    parts = torch.full((programs, n), -1, dtype=torch.int32)
    both = kernel == "both"
    launch("quantize_rows_e4m3" if kernel != "integers" else "quantize_rows", dict(COLUMNS=int(both)),
           lambda o: (programs if both else blocks(o),), q, scale, parts, x, rows, n, inner, *strides)
    if not both:
        launch("column_peaks", {}, lambda o: (-(-n // o["BLOCK_N"]), programs), parts, x, rows, n, inner, *strides)
    v = find("column_scales").variant(int(not aligned))
    v.kernel.function[(-(-n // v.constexprs["BLOCK_N"]),)](scale_t, parts, programs, n, **v.constexprs)
    launch("quantize_columns_e4m3" if kernel != "integers" else "quantize_columns", {},
           lambda o: (blocks(o) * -(-n // o["BLOCK_N"]),), wider[:, before:], scale_t, x,
           rows, n, inner, *strides, pitch)
    q_t = wider[:, before : before + rows].contiguous()
    wider[:, before : before + rows] = 0x55
    assert (wider == 0x55).all()
    numpy.savez(path, x=x.contiguous(), q=q, scale=scale, q_t=q_t, scale_t=scale_t)
"""
QUICK = [
    ("fp32", 200, True, "both"),
    ("fp16", 1032, True, "both"),
    ("fp32", 4104, True, "rows"),
    ("fp16", 61, False, "rows"),
    ("fp32", 200, True, "integers"),
    ("fp16", 2063, False, "integers"),
]
THOROUGH = [("fp16", 8200, True, "both"), ("fp32", 2056, True, "both"), ("fp16", 16392, True, "rows")]


def as_bits(t):
    return torch.where((t & 0x7F) == 0x7F, 0x7F, t)


@cases(QUICK, THOROUGH)
def test_kernels_interpreted(case, interpreted):
    got = interpreted
    q, scale, q_t, scale_t = F.quantize_both.reference(got["x"])
    for name, expected in dict(scale=scale, scale_t=scale_t).items():
        torch.testing.assert_close(got[name], expected.flatten(), rtol=0, atol=0, equal_nan=True)
    for name, expected in dict(q=q, q_t=q_t).items():
        assert torch.equal(as_bits(got[name]), as_bits(expected.view(torch.uint8))), name


@pytest.mark.parametrize("name", ["quantize_rows_e4m3", "quantize_columns_e4m3"])
def test_fp32_is_rounded_once(name):
    """Through fp16, a number close to the middle of two would become the middle."""
    kernel = tables.find(name)
    for dtype in ("bf16", "fp32"):
        variant = next(v for v in kernel.variants() if v.choices["X"] == dtype)
        text = compile_variant(variant, [kernel.archs[0]]).ptx.decode()
        assert set(re.findall(r"cvt\S*e4m3\S*", text)) == {"cvt.rn.satfinite.e4m3x2.f32"}, variant.name


def rounded(exact: Fraction) -> Fraction:
    """To 24 bits, ties to even."""
    step = Fraction(2) ** (exact.numerator.bit_length() - exact.denominator.bit_length() - 24)
    while abs(exact) >= step * 2**24:
        step *= 2
    return round(exact / step) * step


def test_the_remainder_makes_quotients_exact():
    """The instructions that divide by 448, in exact fractions."""
    first, divisor, second = (
        Fraction(struct.unpack(">f", bytes.fromhex(bits))[0]) for bits in re.findall(r"0f([0-9A-F]{8})", OVER_448.value)
    )
    chosen = random.Random(0).sample(range(2**23, 2**24), 5000)
    for number in map(Fraction, [*range(2**23, 2**23 + 500), *range(2**24 - 500, 2**24), *chosen]):
        quotient = rounded(number * first)
        rest = rounded(quotient * divisor + number)
        assert rounded(rest * second + quotient) == rounded(number / 448), number
