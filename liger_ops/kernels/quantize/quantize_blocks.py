"""Matrices in e4m3 with one fp32 scale per block, or one in all: rows, and their transposed copy, in one launch.

A program takes a tile of 128 by 128 numbers, which has all that its scales depend on: those of its rows and of its columns,
its own, or that of the whole matrix, for which other programs have found the largest magnitude.

x: (rows, n), x_stride from one row to the next. q: (written, n) bytes, of which rows from `rows` on are zeros; none if has_q
is 0. q_t: (n, written) bytes, pitch from one row to the next; none if pitch is 0. An aligned config takes multiples of 16.
"""

import triton
import triton.language as tl

from ..elements import DTYPES
from ..table import Kernel
from .quantize_rows import WITH_E4M3, four_in_e4m3, inverse, magnitude, scale_of, tile, to_e4m3


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
    WORDS: tl.constexpr,
):  # fmt: skip
    """A scale for 128 numbers of a row, and of a column: scale (blocks of n, scale_pitch), scale_t (blocks of rows,
    scale_t_pitch). SHARED: for the tile, if count is -1: scale (blocks of rows, scale_pitch), scale_t (blocks of n,
    scale_t_pitch); else for all: scale (1,), which every program computes and the first one stores.
    The tile is read twice, STRIP rows at a time, so that it needs few registers; the second time from a cache. WORDS: four
    rows of the transposed copy go through shared memory as one integer."""
    if WORDS:
        # Multiples of 16, as Triton sees here.
        n, pitch = n // 16 * 16, pitch // 16 * 16
    blocks = tl.cdiv(n, BLOCK_N)
    down = tl.program_id(0) // blocks
    across = tl.program_id(0) - down * blocks
    cols = across * BLOCK_N + tl.arange(0, BLOCK_N)
    top, end = down * BLOCK_M, down * BLOCK_M + BLOCK_M
    peak = tl.zeros([STRIP, BLOCK_N], tl.int32)
    if (not SHARED) or count < 0:
        for first in range(top, end, STRIP):
            row = first + tl.arange(0, STRIP)
            v = load_strip(x, row, cols, rows, n, x_stride)
            peak = tl.maximum(peak, magnitude(v))
            if not SHARED:
                if has_q > 0:
                    own = scale_of(tl.max(magnitude(v), axis=1))
                    tl.store(scale + across.to(tl.int64) * scale_pitch + row, own, mask=row < written)
                    store_rows(q, to_e4m3(v * inverse(own)[:, None], HARDWARE), row, cols, written, n)
    if not SHARED:
        own_t = scale_of(tl.max(peak, axis=0))
        factor = inverse(own_t)[None, :]
        if pitch > 0:
            tl.store(scale_t + down.to(tl.int64) * scale_t_pitch + cols, own_t, mask=cols < n)
    else:
        if count < 0:
            shared = scale_of(tl.max(tl.max(peak, axis=1), axis=0))
            if has_q > 0:
                tl.store(scale + down.to(tl.int64) * scale_pitch + across, shared)
            if pitch > 0:
                tl.store(scale_t + across.to(tl.int64) * scale_t_pitch + down, shared)
        else:
            shared = scale_of_tensor(scale, peaks, count, BLOCK_M * BLOCK_N // 8)
            if count > 0:
                if tl.program_id(0) == 0:
                    tl.store(scale, shared)
        factor = inverse(shared + tl.zeros([1, 1], tl.float32))
    if SHARED or pitch > 0:
        for first in range(top, end, STRIP):
            quads = first // 4 + tl.arange(0, STRIP // 4)
            parts = ()
            for i in tl.static_range(4):
                row = 4 * quads + i
                parts = parts + (load_strip(x, row, cols, rows, n, x_stride) * factor,)
            for i in tl.static_range(4):
                row = 4 * quads + i
                if SHARED:
                    if has_q > 0:
                        store_rows(q, to_e4m3(parts[i], HARDWARE), row, cols, written, n)
                if not WORDS:
                    if pitch > 0:
                        store_columns(q_t, to_e4m3(parts[i], HARDWARE), row, cols, written, n, pitch)
            if WORDS:
                if pitch > 0:
                    words = four_in_e4m3(parts[0], parts[1], parts[2], parts[3], HARDWARE)
                    to = q_t.to(tl.pointer_type(tl.int32))
                    store_columns(to, words, quads, cols, written // 16 * 4, n, pitch // 4)


@triton.jit
def tensor_peaks_kernel(peaks, x, rows, n, x_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Each program: the largest magnitude of its tiles."""
    blocks = tl.cdiv(n, BLOCK_N)
    peak = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for block in range(tl.program_id(0), blocks * tl.cdiv(rows, BLOCK_M), tl.num_programs(0)):
        down = block // blocks
        row = down * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        cols = (block - down * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        at = x + row.to(tl.int64) * x_stride + cols
        peak = tl.maximum(peak, magnitude(tl.load(at, mask=(row < rows) & (cols < n), other=0.0)))
    tl.store(peaks + tl.program_id(0), tl.max(tl.max(peak, axis=1), axis=0))


SIZES = {"rows": "i32", "n": "i32", "x_stride": "i64"}
PITCHES = dict.fromkeys(["written", "has_q", "pitch", "scale_pitch", "scale_t_pitch", "count"], "i32")
ARGUMENTS = {
    "q": "*u8", "scale": "*fp32", "q_t": "*u8", "scale_t": "*fp32", "peaks": "*i32", "x": "*X", **SIZES, **PITCHES,
}  # fmt: skip


def tiles_kernel(hardware, configs, **options):
    axes = {"dtype": DTYPES, "sharing": [{"SHARED": s} for s in (0, 1)], "cast": [{"HARDWARE": hardware}]}
    aligned = ["q", "q_t", "x", "n", "x_stride"]
    return Kernel(quantize_tiles_kernel, ARGUMENTS, aligned, axes, configs, **options)


ANY = tile(128, 128, 8, aligned=False, STRIP=32, WORDS=0)
FAST = [
    tile(128, 128, 4, only={"SHARED": (0,)}, STRIP=64, WORDS=1),
    tile(128, 128, 8, only={"SHARED": (1,)}, STRIP=128, WORDS=1),
]
KERNELS = [
    tiles_kernel(1, [*FAST, ANY], archs=WITH_E4M3, suffix="_e4m3"),
    tiles_kernel(0, [ANY]),
    Kernel(
        function=tensor_peaks_kernel,
        args={"peaks": "*i32", "x": "*X", **SIZES},
        aligned=["x", "n", "x_stride"],
        axes={"dtype": DTYPES},
        configs=[tile(16, 256, 4), tile(16, 128, 4, aligned=False)],
    ),
]
