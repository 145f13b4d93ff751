"""Rows, and columns, of a matrix in e4m3 with one fp32 scale each.

x: (rows, n) with two levels of strides (../rows.py). q: (rows, n) bytes, q_t: (n, rows) bytes, of which rows may be
columns of a wider one.

Magnitudes are compared as integers, which order them as floats do, with NaN above infinity. Scales of columns need three
launches: maxima in parts, beside the rows' own results where a row fits into registers; their maximum; the transposed
copy. No sum, no atomic: the same bits in every run.
"""

import triton
import triton.language as tl

from ..elements import DTYPES
from ..rows import block_rows, load_tiles, prefetch, row_offset, strides
from ..table import Config, Kernel

# Architectures for which Triton converts fp32 to e4m3 in one instruction; kernels are lowered for the first. For 8.9 it
# rounds to fp16 in between.
WITH_E4M3 = [90, 100, 120]


@triton.jit
def magnitude(x):
    """Bits of |x| in fp32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


# A division would also handle the ends of fp32's range, in a branch with a call. These constants are 1/448 and -448: the
# remainder of the first quotient corrects it to the nearest number.
OVER_448 = tl.constexpr("""{
    .reg .f32 quotient, rest;
    mul.rn.f32 quotient, $1, 0f3B124925;
    fma.rn.f32 rest, quotient, 0fC3E00000, $1;
    fma.rn.f32 $0, rest, 0f3B124925, quotient;
    }""")
INVERSE = tl.constexpr("""{
    .reg .f32 near, rest;
    rcp.approx.ftz.f32 near, $1;
    fma.rn.f32 rest, near, $1, 0fBF800000;
    neg.f32 rest, rest;
    fma.rn.f32 $0, rest, near, near;
    }""")
# Bits in fp32.
LEAST_SCALE = tl.constexpr(1 << 23)  # 2^-126
ONE = tl.constexpr(127 << 23)
INFINITE = tl.constexpr(255 << 23)


@triton.jit
def scale_of(peak):
    """peak: bits of the largest magnitude. NaN stays NaN."""
    number = peak.to(tl.float32, bitcast=True)
    bits = tl.inline_asm_elementwise(OVER_448, "=r,f", [number], dtype=tl.int32, is_pure=True, pack=1)
    bits = tl.where(peak >= INFINITE, peak, tl.maximum(bits, LEAST_SCALE))
    return tl.where(peak == 0, ONE, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse(scale):
    """1 / scale, to the nearest number."""
    bits = tl.inline_asm_elementwise(INVERSE, "=r,f", [scale], dtype=tl.int32, is_pure=True, pack=1)
    return tl.where(scale == float("inf"), 0, bits).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x, HARDWARE: tl.constexpr):
    """The bytes of fp32 numbers of at most 464, or NaN, in e4m3: to nearest, ties to even."""
    if HARDWARE:
        out = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # The exponent's bias is 7 instead of 127. A carry out of the fraction rounds up to the next power of two.
        normal = (size + (0x7FFFF - (120 << 23)) + ((size >> 20) & 1)) >> 20
        # 2^14 shifts the fraction of a subnormal, a multiple of 2^-9, to the lowest bits, and addition rounds it.
        subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
        out = tl.where(size < (121 << 23), subnormal, normal)
        out = tl.where(size > 0x7F800000, 0x7F, out)
        out = (out | ((bits >> 24) & 0x80)).to(tl.uint8)
    return out


FOUR_IN_E4M3 = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }""")


@triton.jit
def four_in_e4m3(a, b, c, d, HARDWARE: tl.constexpr):
    """Their bytes, a's the lowest, in an integer."""
    if HARDWARE:
        out = tl.inline_asm_elementwise(
            FOUR_IN_E4M3, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        out = to_e4m3(a, HARDWARE).to(tl.int32) | (to_e4m3(b, HARDWARE).to(tl.int32) << 8)
        out |= (to_e4m3(c, HARDWARE).to(tl.int32) << 16) | (to_e4m3(d, HARDWARE).to(tl.int32) << 24)
    return out


@triton.jit
def peak_tiles(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(TILES):
        tiles = tiles + (tl.zeros([BLOCK_M, BLOCK_N], tl.int32),)
    return tiles


@triton.jit
def quantize_rows_kernel(
    q, scale, parts, x,
    rows, n, inner_rows, x_outer, x_inner,
    HARDWARE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """With COLUMNS, programs are persistent, and each writes the columns' largest magnitudes in its rows: (programs, n).
    TILES = 0: rows of any length, read twice. AHEAD: a program's next row is requested before it computes one."""
    peaks = peak_tiles(BLOCK_M, BLOCK_N, TILES if COLUMNS else 0)
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        row = block_rows(block, BLOCK_M)
        mask = row < rows
        start = x + row_offset(row, inner_rows, x_outer, x_inner)
        out = q + row_offset(row, 0, n, n)
        cols = tl.arange(0, BLOCK_N)[None, :]
        peak = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        if TILES == 0:
            for first in range(0, n, BLOCK_N):
                here = first + cols
                peak = tl.maximum(peak, magnitude(tl.load(start + here, mask=mask & (here < n), other=0.0)))
        else:
            tiles = load_tiles(start, mask, n, BLOCK_N, TILES)
            if COLUMNS and AHEAD:
                later = block_rows(block + tl.num_programs(0), BLOCK_M)
                prefetch(x + row_offset(later, inner_rows, x_outer, x_inner), 0, tl.where(later < rows, n, 0))
            for t in tl.static_range(TILES):
                peak = tl.maximum(peak, magnitude(tiles[t]))
        own = scale_of(tl.max(peak, axis=1)[:, None])
        tl.store(scale + row + tl.zeros([BLOCK_M, 1], tl.int32), own, mask=mask & tl.full([BLOCK_M, 1], True, tl.int1))
        factor = inverse(own)
        if TILES == 0:
            for first in range(0, n, BLOCK_N):
                here = first + cols
                v = tl.load(start + here, mask=mask & (here < n), other=0.0).to(tl.float32)
                tl.store(out + here, to_e4m3(v * factor, HARDWARE), mask=mask & (here < n))
        else:
            for t in tl.static_range(TILES):
                here = t * BLOCK_N + cols
                tl.store(out + here, to_e4m3(tiles[t].to(tl.float32) * factor, HARDWARE), mask=mask & (here < n))
            if COLUMNS:
                found = ()
                for t in tl.static_range(TILES):
                    found = found + (tl.maximum(peaks[t], magnitude(tiles[t])),)
                peaks = found
    if COLUMNS:
        mine = parts + tl.program_id(0).to(tl.int64) * n
        for t in tl.static_range(TILES):
            here = t * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(mine + here, tl.max(peaks[t], axis=0), mask=here < n)


@triton.jit
def column_peaks_kernel(parts, x, rows, n, inner_rows, x_outer, x_inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Each program: the largest magnitudes of its columns in its share of the rows. parts: (programs of axis 1, n)."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    peak = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(tl.program_id(1) * BLOCK_M, rows, tl.num_programs(1) * BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)[:, None]
        at = x + row_offset(row, inner_rows, x_outer, x_inner) + cols[None, :]
        peak = tl.maximum(peak, magnitude(tl.load(at, mask=(row < rows) & (cols < n)[None, :], other=0.0)))
    tl.store(parts + tl.program_id(1).to(tl.int64) * n + cols, tl.max(peak, axis=0), mask=cols < n)


@triton.jit
def column_scales_kernel(scale_t, parts, rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """parts: (rows, n) -> scale_t: (n,)"""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    peak = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for first in range(0, rows, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        at = parts + row.to(tl.int64)[:, None] * n + cols[None, :]
        peak = tl.maximum(peak, tl.load(at, mask=(row < rows)[:, None] & (cols < n)[None, :], other=0))
    tl.store(scale_t + cols, scale_of(tl.max(peak, axis=0)), mask=cols < n)


@triton.jit
def quantize_columns_kernel(
    q_t, scale_t, x,
    rows, n, inner_rows, x_outer, x_inner, pitch,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """q_t: pitch bytes from one column of x to the next."""
    # Neighbouring programs read neighbouring columns of the same rows.
    blocks = tl.cdiv(n, BLOCK_N)
    row_block = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - row_block * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    factor = inverse(tl.load(scale_t + cols, mask=cols < n, other=1.0))
    at = x + row_offset(row[:, None], inner_rows, x_outer, x_inner) + cols[None, :]
    mask = (row < rows)[:, None] & (cols < n)[None, :]
    v = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    out = tl.trans(to_e4m3(v * factor[None, :], HARDWARE))
    # 64-bit before the multiplication: q_t may have more than 2^31 elements.
    to = q_t + cols.to(tl.int64)[:, None] * pitch + row[None, :]
    tl.store(to, out, mask=(cols < n)[:, None] & (row < rows)[None, :])


SIZES = {"rows": "i32", "n": "i32", "inner_rows": "i32", **strides("x")}
ROWS = {"q": "*u8", "scale": "*fp32", "parts": "*i32", "x": "*X", **SIZES}
COLUMNS = {"q_t": "*u8", "scale_t": "*fp32", "x": "*X", **SIZES, "pitch": "i32"}
STRIDES = [*strides("x")]
# The host asks for COLUMNS where rows are aligned and fit into registers.
ROWS_ALONE = {"COLUMNS": (0,)}


def rows_config(max_n, block_m, block_n, tiles, num_warps, aligned=True, only=None, ahead=0):
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles, AHEAD=ahead)
    return Config(max_n, aligned, num_warps, constexprs=constexprs, only=only or {})


def tile(block_m, block_n, num_warps, aligned=True, only=None, **options):
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, **options)
    return Config(None, aligned, num_warps, constexprs=constexprs, only=only or {})


ANY = rows_config(None, 1, 2048, 0, 8, aligned=False)
ROW_CONFIGS = [
    rows_config(512, 4, 512, 1, 4),
    rows_config(2048, 1, 2048, 1, 4, ahead=1),
    rows_config(4096, 1, 2048, 2, 4, ahead=1),
    rows_config(8192, 1, 4096, 2, 8, ahead=1),
    rows_config(16384, 1, 4096, 4, 8, ahead=1),
    rows_config(32768, 1, 4096, 8, 16, only=ROWS_ALONE),
    rows_config(None, 1, 4096, 0, 8, only=ROWS_ALONE),
    ANY,
]


def row_kernel(hardware, choices, configs, **options):
    axes = {"dtype": DTYPES, "cast": [{"HARDWARE": hardware}], "columns": [{"COLUMNS": c} for c in choices]}
    return Kernel(quantize_rows_kernel, ROWS, ["q", "x", "n", *STRIDES], axes, configs, **options)


def column_kernel(hardware, configs, **options):
    axes = {"dtype": DTYPES, "cast": [{"HARDWARE": hardware}]}
    # Rows too: else the mask of the transposed copy would part its accesses into bytes.
    aligned = ["q_t", "scale_t", "x", "rows", "n", *STRIDES, "pitch"]
    return Kernel(quantize_columns_kernel, COLUMNS, aligned, axes, configs, **options)


KERNELS = [
    row_kernel(1, (0, 1), ROW_CONFIGS, archs=WITH_E4M3, suffix="_e4m3"),
    # Without the instruction, converting takes longer than memory, so that few configs are enough.
    row_kernel(0, (0,), [rows_config(512, 4, 512, 1, 4), ANY]),
    column_kernel(1, [tile(128, 64, 8), tile(32, 64, 4, aligned=False)], archs=WITH_E4M3, suffix="_e4m3"),
    column_kernel(0, [tile(32, 64, 4, aligned=False)]),
    Kernel(
        function=column_peaks_kernel,
        args={"parts": "*i32", "x": "*X", **SIZES},
        aligned=["parts", "x", "n", *STRIDES],
        axes={"dtype": DTYPES},
        configs=[tile(64, 128, 4), tile(32, 64, 4, aligned=False)],
    ),
    Kernel(
        function=column_scales_kernel,
        args={"scale_t": "*fp32", "parts": "*i32", "rows": "i32", "n": "i32"},
        aligned=["scale_t", "parts", "n"],
        axes={"dtype": [{}]},
        configs=[tile(64, 32, 8), tile(64, 32, 4, aligned=False)],
    ),
]
