"""Matrices in e4m3 with one fp32 scale per block, or one in all: rows, and their transposed copy, from one read.

A program takes a tile of 128 by 128 numbers, which has all that its scales depend on: those of its rows and of its columns,
its own, or that of the whole matrix, for which other programs have found the largest magnitude.

x: (rows, n), x_stride from one row to the next. q: (written, n) bytes, of which rows from `rows` on are zeros; none if has_q
is 0. q_t: (n, written) bytes, pitch from one row to the next; none if pitch is 0.
"""

import triton
import triton.language as tl

from ..elements import DTYPES
from ..table import Config, Kernel
from .quantize_rows import WITH_E4M3, inverse, magnitude, scale_of, to_e4m3


@triton.jit
def scale_of_tensor(scale, peaks, count, BLOCK: tl.constexpr):
    """From `count` magnitudes, or, if there is none, what an earlier launch has stored."""
    if count > 0:
        peak = tl.zeros([BLOCK], tl.int32)
        for first in range(0, count, BLOCK):
            i = first + tl.arange(0, BLOCK)
            peak = tl.maximum(peak, tl.load(peaks + i, mask=i < count, other=0))
        found = scale_of(tl.max(peak, axis=0))
    else:
        found = tl.load(scale)
    return found


# 64-bit before multiplications: tensors may have more than 2^31 elements.
@triton.jit
def load_strip(x, row, cols, rows, n, x_stride):
    at = x + row.to(tl.int64)[:, None] * x_stride + cols[None, :]
    return tl.load(at, mask=(row < rows)[:, None] & (cols < n)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(q, numbers, row, cols, written, n):
    to = q + row.to(tl.int64)[:, None] * n + cols[None, :]
    tl.store(to, numbers, mask=(row < written)[:, None] & (cols < n)[None, :])


@triton.jit
def store_columns(q_t, numbers, row, cols, written, n, pitch):
    to = q_t + cols.to(tl.int64)[:, None] * pitch + row[None, :]
    tl.store(to, tl.trans(numbers), mask=(cols < n)[:, None] & (row < written)[None, :])


@triton.jit
def quantize_tiles_kernel(
    q, scale, q_t, scale_t, peaks, x,
    rows, n, x_stride, written, has_q, pitch, scale_pitch, scale_t_pitch, count,
    SHARED: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """A scale for 128 numbers of a row, and of a column: scale (blocks of n, scale_pitch), scale_t (blocks of rows,
    scale_t_pitch). SHARED: for the tile, if count is -1: scale (blocks of rows, scale_pitch), scale_t (blocks of n,
    scale_t_pitch); else for all: scale (1,), which every program computes and the first one stores.
    STRIP rows at a time: if they are not BLOCK_M, the tile is read again, from a cache."""
    blocks = tl.cdiv(n, BLOCK_N)
    down = tl.program_id(0) // blocks
    across = tl.program_id(0) - down * blocks
    cols, strip = across * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, STRIP)
    top, end = down * BLOCK_M, down * BLOCK_M + BLOCK_M
    peak_t = tl.zeros([BLOCK_N], tl.int32)
    if STRIP == BLOCK_M:
        row = top + strip
        v = load_strip(x, row, cols, rows, n, x_stride)
    for first in range(top, end, STRIP):
        if STRIP < BLOCK_M:
            row = first + strip
            v = load_strip(x, row, cols, rows, n, x_stride)
        peak_t = tl.maximum(peak_t, tl.max(magnitude(v), axis=0))
        if not SHARED:
            if has_q > 0:
                own = scale_of(tl.max(magnitude(v), axis=1))
                tl.store(scale + across.to(tl.int64) * scale_pitch + row, own, mask=row < written)
                store_rows(q, to_e4m3(v * inverse(own)[:, None], HARDWARE), row, cols, written, n)
    if not SHARED:
        own_t = scale_of(peak_t)
        if pitch > 0:
            tl.store(scale_t + down.to(tl.int64) * scale_t_pitch + cols, own_t, mask=cols < n)
    else:
        if count < 0:
            shared = scale_of(tl.max(peak_t, axis=0))
            if has_q > 0:
                tl.store(scale + down.to(tl.int64) * scale_pitch + across, shared)
            if pitch > 0:
                tl.store(scale_t + across.to(tl.int64) * scale_t_pitch + down, shared)
        else:
            shared = scale_of_tensor(scale, peaks, count, BLOCK_M * BLOCK_N // 8)
            if count > 0:
                if tl.program_id(0) == 0:
                    tl.store(scale, shared)
        own_t = tl.zeros([BLOCK_N], tl.float32) + shared
    factor = inverse(own_t)[None, :]
    for first in range(top, end, STRIP):
        if STRIP < BLOCK_M:
            row = first + strip
            v = load_strip(x, row, cols, rows, n, x_stride)
        numbers = to_e4m3(v * factor, HARDWARE)
        if SHARED:
            if has_q > 0:
                store_rows(q, numbers, row, cols, written, n)
        if pitch > 0:
            store_columns(q_t, numbers, row, cols, written, n, pitch)


@triton.jit
def tensor_peaks_kernel(peaks, x, rows, n, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Each program: the largest magnitude of its tiles."""
    blocks = tl.cdiv(n, BLOCK_N)
    peak = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for tile in range(tl.program_id(0), blocks * tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        down = tile // blocks
        row = down * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        cols = (tile - down * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at = x + row.to(tl.int64) * x_stride + cols
        peak = tl.maximum(peak, magnitude(tl.load(at, mask=(row < rows) & (cols < n), other=0.0)))
    tl.store(peaks + tl.program_id(0), tl.max(tl.max(peak, axis=1), axis=0))


SIZES = {"rows": "i32", "n": "i32", "x_stride": "i64"}
PITCHES = dict.fromkeys(["written", "has_q", "pitch", "scale_pitch", "scale_t_pitch", "count"], "i32")
ARGUMENTS = {
    "q": "*u8", "scale": "*fp32", "q_t": "*u8", "scale_t": "*fp32", "peaks": "*i32", "x": "*X", **SIZES, **PITCHES,
}  # fmt: skip


def tile(block_m, block_n, num_warps, aligned=True, **options):
    return Config(None, aligned, num_warps, constexprs=dict(BLOCK_M=block_m, BLOCK_N=block_n, **options))


def tiles_kernel(hardware, configs, **options):
    axes = {"dtype": DTYPES, "sharing": [{"SHARED": s} for s in (0, 1)], "cast": [{"HARDWARE": hardware}]}
    # Rows too: else the mask of the transposed copy would part its accesses into bytes.
    aligned = ["q", "q_t", "x", "n", "x_stride", "written", "pitch"]
    return Kernel(quantize_tiles_kernel, ARGUMENTS, aligned, axes, configs, **options)


# Numbers are loaded one by one, with an address each.
ANY = tile(128, 128, 8, aligned=False, STRIP=32)
KERNELS = [
    tiles_kernel(1, [tile(128, 128, 8, STRIP=128), ANY], archs=WITH_E4M3, suffix="_e4m3"),
    tiles_kernel(0, [ANY]),
    Kernel(
        function=tensor_peaks_kernel,
        args={"peaks": "*i32", "x": "*X", **SIZES},
        aligned=["x", "n", "x_stride"],
        axes={"dtype": DTYPES},
        configs=[tile(16, 256, 4), tile(16, 128, 4, aligned=False)],
    ),
]
