"""SwiGLU: out = silu(gate) * up, element by element.

Rows of the three tensors are strided on two levels, so that the halves of one fused projection need no copy. One program
takes a tile of BLOCK_M rows by BLOCK_N columns. What lies in one layout comes as one long row: ONE_ROW leaves out what
addresses others, a division ahead of the first load and half of the code.

The backward recomputes silu(gate). Its results may lie over gate and up: an element is read before it is
written, and by the same thread. With PRODUCT it stores the forward's result too, which may lie over dout.
"""

import triton
import triton.language as tl

from ..rows import block_rows, row_offset
from ..table import Config, Kernel

PRODUCT = tl.constexpr(256)

DTYPES = ({"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"})


@triton.jit
def program_tile(rows, n, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, first column, mask) of this program's tile; only the column needs 64 bits."""
    program = tl.program_id(0)
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
def sigmoid_and_slope(x):
    """With its derivative, which s * (1 - s) would give without its last digits."""
    e = tl.exp(-tl.abs(x))
    r = 1.0 / (1.0 + e)
    return tl.where(x < 0, e * r, r), e * r * r


@triton.jit
def swiglu_fwd_kernel(
    out, gate, up,
    rows, n, inner_rows, out_outer, out_inner, gate_outer, gate_inner, up_outer, up_inner,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    g = load_tile(gate, tile, inner_rows, gate_outer, gate_inner, ONE_ROW, BLOCK_N)
    u = load_tile(up, tile, inner_rows, up_outer, up_inner, ONE_ROW, BLOCK_N)
    g = g.to(tl.float32)
    result = g * tl.sigmoid(g) * u.to(tl.float32)
    store_tile(out, result, tile, inner_rows, out_outer, out_inner, ONE_ROW, BLOCK_N)


@triton.jit
def swiglu_bwd_kernel(
    dgate, dup, product, dout, gate, up,
    rows, n, inner_rows, dgate_outer, dgate_inner, dup_outer, dup_inner, dout_outer, dout_inner,
    gate_outer, gate_inner, up_outer, up_inner, flags,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    g = load_tile(gate, tile, inner_rows, gate_outer, gate_inner, ONE_ROW, BLOCK_N)
    u = load_tile(up, tile, inner_rows, up_outer, up_inner, ONE_ROW, BLOCK_N)
    d = load_tile(dout, tile, inner_rows, dout_outer, dout_inner, ONE_ROW, BLOCK_N)
    g = g.to(tl.float32)
    d = d.to(tl.float32)
    u = u.to(tl.float32)
    s, slope = sigmoid_and_slope(g)
    dg = d * u * (s + g * slope)
    store_tile(dgate, dg, tile, inner_rows, dgate_outer, dgate_inner, ONE_ROW, BLOCK_N)
    store_tile(dup, d * g * s, tile, inner_rows, dup_outer, dup_inner, ONE_ROW, BLOCK_N)
    if flags & PRODUCT:
        store_tile(product, g * s * u, tile, inner_rows, dout_outer, dout_inner, ONE_ROW, BLOCK_N)


def config(max_n, block_m, block_n, num_warps, aligned=True, one_row=False):
    constexprs = dict(ONE_ROW=int(one_row), BLOCK_M=block_m, BLOCK_N=block_n)
    return Config(max_n, aligned, num_warps, constexprs=constexprs, max_rows=1 if one_row else None)


# Narrow rows are strided ones only. Every thread of an aligned config moves 16 bytes a tensor at least.
ONE_ROW = config(None, 1, 1024, 4, one_row=True)
NARROW = [config(64, 16, 64, 4), config(256, 4, 256, 4)]
ANY = [config(64, 16, 64, 4, aligned=False), config(None, 1, 1024, 4, aligned=False)]
FORWARD_CONFIGS = [ONE_ROW, *NARROW, config(1024, 1, 1024, 4), config(None, 1, 2048, 4), *ANY]
# Tiles of 2048 hold twice the registers and take 599 us where these take 545 (16384 x 14336, bf16, H200).
BACKWARD_CONFIGS = [ONE_ROW, *NARROW, config(None, 1, 1024, 4), *ANY]

FORWARD_ARGS = {
    "out": "*X", "gate": "*X", "up": "*X",
    "rows": "i32", "n": "i64", "inner_rows": "i32",
    "out_outer": "i64", "out_inner": "i64",
    "gate_outer": "i64", "gate_inner": "i64", "up_outer": "i64", "up_inner": "i64",
}  # fmt: skip
BACKWARD_ARGS = {
    "dgate": "*X", "dup": "*X", "product": "*X", "dout": "*X", "gate": "*X", "up": "*X",
    "rows": "i32", "n": "i64", "inner_rows": "i32",
    "dgate_outer": "i64", "dgate_inner": "i64", "dup_outer": "i64", "dup_inner": "i64",
    "dout_outer": "i64", "dout_inner": "i64",
    "gate_outer": "i64", "gate_inner": "i64", "up_outer": "i64", "up_inner": "i64", "flags": "i32",
}  # fmt: skip
# rows and inner_rows are counts, not offsets.
FORWARD_ALIGNED = [a for a in FORWARD_ARGS if "rows" not in a]
BACKWARD_ALIGNED = [a for a in BACKWARD_ARGS if "rows" not in a and a != "flags"]

KERNELS = [
    Kernel(
        function=swiglu_fwd_kernel,
        args=FORWARD_ARGS,
        aligned=FORWARD_ALIGNED,
        axes={"dtype": DTYPES},
        configs=FORWARD_CONFIGS,
    ),
    Kernel(
        function=swiglu_bwd_kernel,
        args=BACKWARD_ARGS,
        aligned=BACKWARD_ALIGNED,
        axes={"dtype": DTYPES},
        configs=BACKWARD_CONFIGS,
    ),
]
