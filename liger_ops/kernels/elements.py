"""Shared code of elementwise kernels.

Rows are strided on two levels, so that the halves of a fused projection need no copy. One program processes a tile of
BLOCK_M rows by BLOCK_N columns. Tensors with the same dense layout are passed as one long row. ONE_ROW then omits row
addressing: a division before the first load, and half of the code.
"""

import triton
import triton.language as tl

from .rows import block_rows, row_offset
from .table import Config

SIZES = {"rows": "i32", "n": "i64", "inner_rows": "i32"}
DTYPES = ({"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"})


@triton.jit
def program_tile(rows, n, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    return tile_at(tl.program_id(0), rows, n, ONE_ROW, BLOCK_M, BLOCK_N)


@triton.jit
def tile_at(program, rows, n, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, first column, mask) of a tile. Only the first column is 64-bit."""
    if ONE_ROW:
        row = 0
        start = program.to(tl.int64) * BLOCK_N
    else:
        blocks = tl.cdiv(n, BLOCK_N).to(tl.int32)
        row_block = program // blocks
        start = (program - row_block * blocks).to(tl.int64) * BLOCK_N
        row = block_rows(row_block, BLOCK_M)
    width = tl.minimum(n - start, BLOCK_N).to(tl.int32)
    return row, start, (row < rows) & (tl.arange(0, BLOCK_N) < width)[None, :]


@triton.jit
def tile_pointers(base, tile, inner_rows, outer_stride, inner_stride, ONE_ROW: tl.constexpr, BLOCK_N: tl.constexpr):
    row, start, _ = tile
    offset = start if ONE_ROW else row_offset(row, inner_rows, outer_stride, inner_stride) + start
    return base + offset + tl.arange(0, BLOCK_N)[None, :]


@triton.jit
def load_tile(base, tile, inner_rows, outer_stride, inner_stride, ONE_ROW: tl.constexpr, BLOCK_N: tl.constexpr):
    pointers = tile_pointers(base, tile, inner_rows, outer_stride, inner_stride, ONE_ROW, BLOCK_N)
    return tl.load(pointers, mask=tile[2], other=0.0)


@triton.jit
def store_tile(base, value, tile, inner_rows, outer_stride, inner_stride, ONE_ROW: tl.constexpr, BLOCK_N: tl.constexpr):
    pointers = tile_pointers(base, tile, inner_rows, outer_stride, inner_stride, ONE_ROW, BLOCK_N)
    tl.store(pointers, value, mask=tile[2])


@triton.jit
def load_parameter(narrow, wide, at, mask):
    """Of a tensor in the dtype of rows, or in fp32 if `wide` is not null. As a choice of the table that would double it."""
    is_wide = wide.to(tl.int64) != 0
    value = tl.load(narrow + at, mask=mask & (is_wide == 0), other=0.0).to(tl.float32)
    return value + tl.load(wide + at, mask=mask & is_wide, other=0.0)


def config(max_n, block_m, block_n, num_warps, aligned=True, one_row=False):
    constexprs = dict(ONE_ROW=int(one_row), BLOCK_M=block_m, BLOCK_N=block_n)
    return Config(max_n, aligned, num_warps, constexprs=constexprs, max_rows=1 if one_row else None)


# Narrow configs are for strided rows only. In an aligned config, every thread moves at least 16 bytes per tensor.
ONE_ROW = config(None, 1, 1024, 4, one_row=True)
NARROW = [config(64, 16, 64, 4), config(256, 4, 256, 4)]
ANY = [config(64, 16, 64, 4, aligned=False), config(None, 1, 1024, 4, aligned=False)]
FORWARD_CONFIGS = [ONE_ROW, *NARROW, config(1024, 1, 1024, 4), config(None, 1, 2048, 4), *ANY]
# Smaller tiles than in forward, because backward needs more registers per element.
BACKWARD_CONFIGS = [ONE_ROW, *NARROW, config(None, 1, 1024, 4), *ANY]
