"""What row-wise kernels share: addressing rows of a strided tensor, and loading tiles of them.

A tensor of any rank is seen as rows of n contiguous elements. Rows are numbered 0..rows-1 and live on
two levels, so that a slice of a fused projection or a transposed view needs no copy:
    offset(row) = (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride
"""

import triton
import triton.language as tl


@triton.jit
def row_offset(row, inner_rows, outer_stride, inner_stride):
    # 64-bit before the product: a tensor may hold more than 2**31 elements.
    outer = row // inner_rows
    return outer.to(tl.int64) * outer_stride + (row - outer * inner_rows).to(tl.int64) * inner_stride


@triton.jit
def load_parameter(pointer, cols, n, present, neutral: tl.constexpr):
    """A per-column parameter in fp32; an absent one costs no traffic and reads as `neutral`."""
    return tl.load(pointer + cols, mask=(cols < n) & (present != 0), other=neutral).to(tl.float32)


@triton.jit
def load_tiles(pointer, offset, row_mask, n, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    """Whole rows as a tuple of TILES tensors of (rows, BLOCK_N), in the tensor's own dtype."""
    tiles = ()
    for t in tl.static_range(TILES):
        cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = row_mask[:, None] & (cols < n)[None, :]
        tiles = tiles + (tl.load(pointer + offset[:, None] + cols[None, :], mask=mask, other=0.0),)
    return tiles


@triton.jit
def zero_tiles(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(TILES):
        tiles = tiles + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    return tiles
