"""The kernels of e4m3 numbers, which operators launch in Triton's interpreter. It has no instruction that converts to e4m3, so that
all configs run with integer arithmetic here."""

import random
import re
import struct
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import liger_ops.kernels as tables
from liger_ops import functional as F
from liger_ops.aot.compile import compile_variant
from liger_ops.kernels.quantize.quantize_rows import OVER_448
from liger_ops.reference.quantize_blocks import blocks_in_e4m3, squares_in_e4m3, tensor_in_e4m3
from tests.support.families.quantizers import QUANTIZERS
from tests.support.host import kernel_process
from tests.support.models.quantised import as_bits

# Columns, dtype, compute capability.
QUICK = [(200, torch.float32, 90), (2056, torch.bfloat16, 90), (61, torch.float16, 90), (272, torch.float16, 80)]
THOROUGH = [(n, torch.bfloat16, 90) for n in (1032, 4104, 8200, 16392)] + [(2063, torch.float16, 80)]


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize(
    "n, dtype, capability", QUICK + [pytest.param(*c, marks=pytest.mark.thorough) for c in THOROUGH]
)
def test_quantizers(n, dtype, capability, device):
    kernel_process.imitate(capability, 3)
    # Rows in two levels, 45 of them. The last block is partial.
    x = (torch.randn(15, 4, 2 * n) * 10.0 ** torch.randint(-3, 3, (15, 4, 1))).to(dtype)[:, :3, n:]
    x[1, 0], x[..., 1] = 0, 0
    x[2, 1, 2], x[3, 0, 3] = torch.nan, torch.inf
    ties = [1.0, 2**-7, 2**-8, 2**-9, 2**-10, 3 * 2**-10, 5 * 2**-10, -(2**-11), -0.0]
    x[3, 2, :9] = 448 * torch.tensor(ties)
    launched = set()
    for op, options in QUANTIZERS.values():
        kernel_process.launched.clear()
        for i, (a, b) in enumerate(zip(op(x, **options), op.reference(x, **options), strict=True)):
            assert torch.equal(as_bits(a), as_bits(b)), f"{op.__name__} {options}: result {i}"
        launched |= kernel_process.kernels_launched()
    suffix = "_e4m3" if capability == 90 else ""
    converting = {f"quantize_{name}{suffix}" for name in ("rows", "columns", "tiles")}
    assert launched == converting | {"column_peaks", "column_scales"}


# ---- What only FP8 GEMMs take, which need a GPU: transposed copies between others, and one scale for a tensor

NOTHING = 0x55


def between(rows: int, columns: int, first: int) -> tuple[Tensor, Tensor]:
    """Bytes, and those from column `first` on."""
    wide = torch.full((rows, columns), NOTHING, dtype=torch.uint8)
    return wide, wide[:, first:]


def taken_from(wide: Tensor, first: int, columns: int) -> Tensor:
    """The columns that a kernel has written, and no others."""
    found = wide[:, first : first + columns].clone()
    wide[:, first : first + columns] = NOTHING
    assert (wide == NOTHING).all()
    return found


@pytest.mark.parametrize("device", ["interpreted"])
def test_transposed_columns(device):
    n, rows = 61, 43
    x = torch.randn(rows, n)
    wide, out = between(n, rows + 21, 8)
    q, scale = F.quantize_columns(x)
    variant = tables.find("quantize_columns").pick(dict(X="fp32"), n, False)
    c = variant.constexprs
    programs = -(-rows // c["BLOCK_M"]) * -(-n // c["BLOCK_N"])
    variant.kernel.function[(programs,)](out, scale, x, rows, n, rows, 0, n, rows + 21, **c)
    assert torch.equal(as_bits(taken_from(wide, 8, rows)), as_bits(q))


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("by", [blocks_in_e4m3, squares_in_e4m3, tensor_in_e4m3])
@pytest.mark.parametrize(
    "dtype, n, kernel",
    [("fp16", 144, "quantize_tiles_e4m3"), pytest.param("fp32", 61, "quantize_tiles", marks=pytest.mark.thorough)],
)
def test_tiles(dtype, n, kernel, by, device):
    """Rows are padded to 256, and the second tile has few of them."""
    rows, written, programs, before = 150, 256, 3, 16
    of = dict(fp16=torch.float16, fp32=torch.float32)[dtype]
    x = (torch.randn(rows, 2 * n) * 10.0 ** torch.randint(-3, 3, (rows, 1))).to(of)[:, n:]
    x[3], x[:, 1] = 0, 0
    whole = by is tensor_in_e4m3
    if not whole:
        x[7, 2], x[140, 3] = torch.nan, torch.inf
    down, across, pitch = written // 128, -(-n // 128), written + 32
    shapes = {
        blocks_in_e4m3: ((across, written), (down, n)),
        squares_in_e4m3: ((down, across + 1), (across, down + 2)),
        tensor_in_e4m3: ((1,), (1,)),
    }
    scale, scale_t = (torch.full(shape, -1.0) for shape in shapes[by])
    peaks = torch.full((programs,), -1, dtype=torch.int32)
    if whole:
        v = tables.find("tensor_peaks").pick(dict(X=dtype), n, n % 8 == 0)
        v.kernel.function[(programs,)](peaks, x, rows, n, 2 * n, **v.constexprs)
    v = tables.find(kernel).pick(dict(X=dtype, SHARED=int(by is not blocks_in_e4m3)), n, n % 8 == 0)

    def launch(q, q_t, has_q, pitch, count):
        v.kernel.function[(down * across,)](
            q, scale, q_t, scale_t, peaks, x, rows, n, 2 * n, written, has_q, pitch, scale.shape[-1], scale_t.shape[-1],
            count, **v.constexprs | dict(HARDWARE=0),
        )  # fmt: skip

    (q, _), (wide, out) = between(written, n, 0), between(n, pitch, before)
    launch(q, out, 1, pitch, {squares_in_e4m3: -1, tensor_in_e4m3: programs}.get(by, 0))
    q_t = taken_from(wide, before, written)
    # Each alone, and by the scale of the first launch.
    again = -1 if by is squares_in_e4m3 else 0
    alone, alone_t, unwritten = between(written, n, 0)[0], between(n, written, 0)[0], between(written, n, 0)[0]
    launch(alone, unwritten, 1, 0, again)
    launch(unwritten, alone_t, 0, written, again)
    assert (unwritten == NOTHING).all() and torch.equal(alone, q) and torch.equal(alone_t, q_t)
    padded = torch.zeros(written, n, dtype=of)
    padded[:rows] = x
    for ours, given, found in ((q, padded, scale), (q_t, padded.t().contiguous(), scale_t)):
        expected, expected_scale = by(given)
        assert torch.equal(as_bits(ours), as_bits(expected))
        if whole:
            assert torch.equal(scale, expected_scale.flatten())
            continue
        found = found.t() if by is blocks_in_e4m3 else found[:, : expected_scale.shape[1]]
        assert torch.equal(as_bits(found.contiguous()), as_bits(expected_scale))


@pytest.mark.parametrize("name", ["quantize_rows_e4m3", "quantize_columns_e4m3", "quantize_tiles_e4m3"])
def test_fp32_is_rounded_once(name):
    """Through fp16, a number close to the middle of two would become the middle."""
    kernel = tables.find(name)
    for dtype in ("bf16", "fp32"):
        for variant in {v.choices.get("SHARED"): v for v in kernel.variants() if v.choices["X"] == dtype}.values():
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
