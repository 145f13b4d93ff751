"""Shared code of row-wise kernels: addressing rows of a strided tensor, and loading tiles of them.

A tensor of any rank is seen as rows of n contiguous elements. Rows are numbered 0..rows-1 and strided on
two levels, so that a slice of a fused projection or a transposed view needs no copy:
    offset(row) = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
inner_rows = 0 means one level: a program can then start its loads without waiting for a division.

A program's row is a scalar if BLOCK_M is 1, else its rows are a column (BLOCK_M, 1). Both broadcast against
(1, BLOCK_N) columns. A scalar keeps row addresses in uniform registers: wide rows need all other registers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from .table import HALVES, Config

LOG2E = tl.constexpr(1.4426950408889634)

# Restricts a config to 16-bit rows with parameters of the same dtype.
PLAIN_HALVES = dict(common_only=True, only=HALVES)


def rows_config(
    max_n: int | None, block_m: int, block_n: int, tiles: int, num_warps: int, programs_per_sm: int = 0, *,
    aligned: bool = True, max_rows: int | None = None, common_only: bool = False,
    only: Mapping[str, Sequence[Any]] = {}, **options: Any,
) -> Config:  # fmt: skip
    """A config of BLOCK_M rows per program, in TILES tiles of BLOCK_N columns. `options`: other constexprs."""
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles) | {k.upper(): v for k, v in options.items()}
    # Each lane must belong to one thread: if two shared it, one could refill it while the other still reads it.
    lanes, threads = block_n // 8, 32 * num_warps
    assert not options.get("slots") or lanes >= threads, f"{lanes} lanes of a streamed row for {threads} threads"
    return Config(
        max_n, aligned, num_warps, programs_per_sm, constexprs, common_only=common_only, max_rows=max_rows, only=only
    )


def strides(*tensors: str) -> dict[str, str]:
    """The arguments of a kernel that are the strides of these tensors, on both levels."""
    return {f"{name}_{level}": "i64" for name in tensors for level in ("outer", "inner")}


@triton.jit
def block_rows(block, BLOCK_M: tl.constexpr):
    if BLOCK_M == 1:
        rows = block
    else:
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    return rows


@triton.jit
def block_and_group(program, groups):
    """Of rows and of columns, in the order of core::launch_with_sums."""
    if groups == 1:
        block = program
        group = program * 0
    else:
        block = program // groups
        group = program - block * groups
    return block, group


@triton.jit
def row_offset(row, inner_rows, outer_stride, inner_stride):
    # 64-bit before the multiplication: a tensor may have more than 2**31 elements.
    if inner_rows == 0:
        offset = row.to(tl.int64) * inner_stride
    else:
        outer = row // inner_rows
        offset = outer.to(tl.int64) * outer_stride + (row - outer * inner_rows).to(tl.int64) * inner_stride
    return offset


@triton.jit
def row_mean(tile, n):
    """Mean over a row's n columns, from a tile of partial sums: (BLOCK_M, 1)."""
    return tl.sum(tile, axis=1)[:, None] / n


# Two numbers at a time: GPUs convert single ones at a quarter of the rate.
TO_BF16 = tl.constexpr("""{
    .reg .b32 both;
    cvt.rn.bf16x2.f32 both, $3, $2;
    shl.b32 $0, both, 16;
    and.b32 $1, both, 0xFFFF0000;
}""")


@triton.jit
def round_if(value, condition, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        bits = tl.inline_asm_elementwise(TO_BF16, "=r,=r,f,f", [value], dtype=tl.int32, is_pure=True, pack=2)
        rounded = bits.to(tl.float32, bitcast=True)
    else:
        rounded = value.to(dtype).to(tl.float32)
    return tl.where(condition != 0, rounded, value)


@triton.jit
def load_per_row(pointer, row, mask, BLOCK_M: tl.constexpr):
    if BLOCK_M == 1:
        value = tl.load(pointer + row, mask=mask, other=0.0)
    else:
        # One-dimensional: with a column, every thread of a row would load the value again.
        value = tl.load(pointer + tl.reshape(row, [BLOCK_M]), mask=tl.reshape(mask, [BLOCK_M]), other=0.0)[:, None]
    return value


@triton.jit
def store_per_row(pointer, row, value, mask, BLOCK_M: tl.constexpr):
    """value: (BLOCK_M, 1)"""
    tl.store(pointer + row + tl.zeros([BLOCK_M, 1], tl.int32), value, mask=mask & tl.full([BLOCK_M, 1], True, tl.int1))


@triton.jit
def store_share(out, partial, cols, share, mask, final):
    """Stores one program's share of a parameter's gradient; final: it is the only share."""
    if final:
        tl.store(out + cols, share, mask=mask)
    else:
        tl.store(partial + cols, share, mask=mask)


@triton.jit
def load_parameter(pointer, cols, n, present, neutral: tl.constexpr):
    """A per-column parameter in fp32. An absent one reads as `neutral`, without memory traffic."""
    return tl.load(pointer + cols, mask=(cols < n) & (present != 0), other=neutral).to(tl.float32)


@triton.jit
def load_parameter_tiles(pointer, n, present, neutral: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    """A parameter in its own dtype, as TILES tensors. If rows follow that are loaded IN_ORDER, it arrives with them:
    the compiler keeps the order of volatile loads, but moves other loads to their first use."""
    tiles = ()
    for t in tl.static_range(TILES):
        cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
        tiles = tiles + (tl.load(pointer + cols, mask=(cols < n) & (present != 0), other=neutral, volatile=True),)
    return tiles


@triton.jit
def load_tiles(pointer, row_mask, n, BLOCK_N: tl.constexpr, TILES: tl.constexpr, IN_ORDER: tl.constexpr = False):
    """Rows that start at `pointer` as a tuple of TILES tensors of (BLOCK_M, BLOCK_N), in the tensor's own dtype."""
    tiles = ()
    # Tables hold 0 and 1, but Triton 3.9 accepts only a bool.
    volatile: tl.constexpr = IN_ORDER != 0
    for t in tl.static_range(TILES):
        cols = (t * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        tiles = tiles + (tl.load(pointer + cols, mask=row_mask & (cols < n), other=0.0, volatile=volatile),)
    return tiles


# How far ahead a program prefetches rows of later programs. If it were larger, rows would evict each other from the L2
# cache; if smaller, they would not arrive in time. On an H200, 5 to 8 MiB is best for rows of 4 to 32 KiB.
BYTES_AHEAD = tl.constexpr(6 << 20)


@triton.constexpr_function
def programs_ahead(program_bytes):
    return BYTES_AHEAD.value // program_bytes


# Each thread prefetches one cache line after another until the threads have covered all.
PREFETCH = tl.constexpr("""{
    .reg .u64 at, step;
    .reg .u32 threads;
    .reg .pred more;
    mov.u32 threads, %tid.x;
    and.b64 at, $1, -128;
    mad.wide.u32 at, threads, 128, at;
    mov.u32 threads, %ntid.x;
    mul.wide.u32 step, threads, 128;
    setp.lt.u64 more, at, $2;
    @!more bra done;
    ask:
    prefetch.global.L2 [at];
    add.u64 at, at, step;
    setp.lt.u64 more, at, $2;
    @more bra ask;
    done:
    mov.u32 $0, 0;
    }""")


@triton.jit
def prefetch(row, first, end):
    """Prefetches the columns first..end of a row into the L2 cache for a later program. Without this, memory is idle
    while the programs of a multiprocessor compute between their reads and writes."""
    tl.inline_asm_elementwise(
        PREFETCH, "=r,l,l", [(row + first).to(tl.int64), (row + end).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def zero_tiles(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(TILES):
        tiles = tiles + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    return tiles
