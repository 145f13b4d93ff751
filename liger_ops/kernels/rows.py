"""What row-wise kernels share: addressing rows of a strided tensor, and loading tiles of them.

A tensor of any rank is seen as rows of n contiguous elements. Rows are numbered 0..rows-1 and live on
two levels, so that a slice of a fused projection or a transposed view needs no copy:
    offset(row) = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
inner_rows = 0 says that there is one level: a program then starts its loads without waiting for a division.

A program's rows are a scalar where it has one row, else a column (BLOCK_M, 1): both broadcast against
(1, BLOCK_N) columns. The scalar keeps row addresses in uniform registers, which wide rows cannot spare.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from .table import HALVES, Config

LOG2E = tl.constexpr(1.4426950408889634)

# For rows of 16 bits whose parameters are of their own type.
PLAIN_HALVES = dict(common_only=True, only=HALVES)


def rows_config(
    max_n: int | None, block_m: int, block_n: int, tiles: int, num_warps: int, programs_per_sm: int = 0, *,
    aligned: bool = True, max_rows: int | None = None, common_only: bool = False,
    only: Mapping[str, Sequence[Any]] = {}, **options: Any,
) -> Config:  # fmt: skip
    """Of programs that take BLOCK_M rows in TILES tiles of BLOCK_N columns; `options`: a kernel's other constexprs."""
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles) | {k.upper(): v for k, v in options.items()}
    # Of two threads that had a lane of a streamed row, one might ask for the next row's while the other still reads it.
    lanes, threads = block_n // 8, 32 * num_warps
    assert not options.get("slots") or lanes >= threads, f"{lanes} lanes of a streamed row for {threads} threads"
    return Config(
        max_n, aligned, num_warps, programs_per_sm, constexprs, common_only=common_only, max_rows=max_rows, only=only
    )


@triton.jit
def block_rows(block, BLOCK_M: tl.constexpr):
    if BLOCK_M == 1:
        rows = block
    else:
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    return rows


@triton.jit
def row_offset(row, inner_rows, outer_stride, inner_stride):
    # 64-bit before the product: a tensor may hold more than 2**31 elements.
    if inner_rows == 0:
        offset = row.to(tl.int64) * inner_stride
    else:
        outer = row // inner_rows
        offset = outer.to(tl.int64) * outer_stride + (row - outer * inner_rows).to(tl.int64) * inner_stride
    return offset


@triton.jit
def row_mean(tile, n):
    """Mean over the n columns that a tile's accumulator stands for: (BLOCK_M, 1)."""
    return tl.sum(tile, axis=1)[:, None] / n


@triton.jit
def load_per_row(pointer, row, mask, BLOCK_M: tl.constexpr):
    if BLOCK_M == 1:
        value = tl.load(pointer + row, mask=mask, other=0.0)
    else:
        # One dimension: as a column, every thread of a row would load the value for itself.
        value = tl.load(pointer + tl.reshape(row, [BLOCK_M]), mask=tl.reshape(mask, [BLOCK_M]), other=0.0)[:, None]
    return value


@triton.jit
def store_per_row(pointer, row, value, mask, BLOCK_M: tl.constexpr):
    """value: (BLOCK_M, 1)"""
    tl.store(pointer + row + tl.zeros([BLOCK_M, 1], tl.int32), value, mask=mask & tl.full([BLOCK_M, 1], True, tl.int1))


@triton.jit
def store_share(out, partial, cols, share, mask, final):
    """What one program contributes to a parameter's gradient; final: nobody else does."""
    if final:
        tl.store(out + cols, share, mask=mask)
    else:
        tl.store(partial + cols, share, mask=mask)


@triton.jit
def load_parameter(pointer, cols, n, present, neutral: tl.constexpr):
    """A per-column parameter in fp32; an absent one costs no traffic and reads as `neutral`."""
    return tl.load(pointer + cols, mask=(cols < n) & (present != 0), other=neutral).to(tl.float32)


@triton.jit
def load_parameter_tiles(pointer, n, present, neutral: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    """A parameter of whole rows in its own dtype. Asked for ahead of rows that are loaded IN_ORDER, it arrives with them:
    volatile loads stay where they are, others are put off to where they are used."""
    tiles = ()
    for t in tl.static_range(TILES):
        cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
        tiles = tiles + (tl.load(pointer + cols, mask=(cols < n) & (present != 0), other=neutral, volatile=True),)
    return tiles


@triton.jit
def load_tiles(pointer, row_mask, n, BLOCK_N: tl.constexpr, TILES: tl.constexpr, IN_ORDER: tl.constexpr = False):
    """Rows that start at `pointer` as a tuple of TILES tensors of (BLOCK_M, BLOCK_N), in the tensor's own dtype."""
    tiles = ()
    # Tables hold 0 and 1; Triton 3.9 takes a bool alone.
    volatile: tl.constexpr = IN_ORDER != 0
    for t in tl.static_range(TILES):
        cols = (t * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        tiles = tiles + (tl.load(pointer + cols, mask=row_mask & (cols < n), other=0.0, volatile=volatile),)
    return tiles


# What a device holds on the way from memory to a wave of programs: asked for earlier, rows would drive each other out of the
# L2 cache, later, they would not be there in time. On an H200, rows of 4 to 32 KiB all did best 5 to 8 MiB ahead.
BYTES_AHEAD = tl.constexpr(6 << 20)


@triton.constexpr_function
def programs_ahead(program_bytes):
    return BYTES_AHEAD.value // program_bytes


# Every thread asks for a cache line at a time, as many as there are.
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
    """Asks for the columns first..end of a row to be in the L2 cache, where a later program will look for them: between
    its programs' reads and writes a multiprocessor would leave the memory idle."""
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
