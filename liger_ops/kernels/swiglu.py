"""SwiGLU: out = silu(gate) * up, element by element.

Rows of the three tensors are strided on two levels, so that the halves of one fused projection need no copy;
what is contiguous comes as few wide rows. One program takes a tile of BLOCK_M rows by BLOCK_N columns.

The backward recomputes silu(gate). Its results may lie over gate and up: an element is read before it is
written, and by the same thread. With PRODUCT it stores the forward's result too, which may lie over dout.
"""

import triton
import triton.language as tl

from .rows import block_rows, row_offset
from .table import Config, Kernel

PRODUCT = tl.constexpr(256)

DTYPES = ({"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"})


@triton.jit
def program_tile(rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, first column, mask) of this program's tile; only the column needs 64 bits."""
    program = tl.program_id(0)
    blocks = tl.cdiv(n, BLOCK_N).to(tl.int32)
    row_block = program // blocks
    start = (program - row_block * blocks).to(tl.int64) * BLOCK_N
    row = block_rows(row_block, BLOCK_M)
    width = tl.minimum(n - start, BLOCK_N).to(tl.int32)
    return row, start, (row < rows) & (tl.arange(0, BLOCK_N) < width)[None, :]


@triton.jit
def tile_pointers(base, row, start, inner_rows, outer_stride, inner_stride, BLOCK_N: tl.constexpr):
    return base + (row_offset(row, inner_rows, outer_stride, inner_stride) + start) + tl.arange(0, BLOCK_N)[None, :]


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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, start, mask = program_tile(rows, n, BLOCK_M, BLOCK_N)
    g = tl.load(tile_pointers(gate, row, start, inner_rows, gate_outer, gate_inner, BLOCK_N), mask=mask, other=0.0)
    u = tl.load(tile_pointers(up, row, start, inner_rows, up_outer, up_inner, BLOCK_N), mask=mask, other=0.0)
    g = g.to(tl.float32)
    result = g * tl.sigmoid(g) * u.to(tl.float32)
    tl.store(tile_pointers(out, row, start, inner_rows, out_outer, out_inner, BLOCK_N), result, mask=mask)


@triton.jit
def swiglu_bwd_kernel(
    dgate, dup, product, dout, gate, up,
    rows, n, inner_rows, dgate_outer, dgate_inner, dup_outer, dup_inner, dout_outer, dout_inner,
    gate_outer, gate_inner, up_outer, up_inner, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, start, mask = program_tile(rows, n, BLOCK_M, BLOCK_N)
    g = tl.load(tile_pointers(gate, row, start, inner_rows, gate_outer, gate_inner, BLOCK_N), mask=mask, other=0.0)
    u = tl.load(tile_pointers(up, row, start, inner_rows, up_outer, up_inner, BLOCK_N), mask=mask, other=0.0)
    d = tl.load(tile_pointers(dout, row, start, inner_rows, dout_outer, dout_inner, BLOCK_N), mask=mask, other=0.0)
    g = g.to(tl.float32)
    d = d.to(tl.float32)
    u = u.to(tl.float32)
    s, slope = sigmoid_and_slope(g)
    dg = d * u * (s + g * slope)
    tl.store(tile_pointers(dgate, row, start, inner_rows, dgate_outer, dgate_inner, BLOCK_N), dg, mask=mask)
    tl.store(tile_pointers(dup, row, start, inner_rows, dup_outer, dup_inner, BLOCK_N), d * g * s, mask=mask)
    if flags & PRODUCT:
        tl.store(tile_pointers(product, row, start, inner_rows, dout_outer, dout_inner, BLOCK_N), g * s * u, mask=mask)


def config(max_n, block_m, block_n, num_warps, aligned=True):
    return Config(max_n, aligned, num_warps, constexprs=dict(BLOCK_M=block_m, BLOCK_N=block_n))


# Narrow rows are strided ones only. Every thread of an aligned config moves 16 bytes a tensor at least.
NARROW = [config(64, 16, 64, 4), config(256, 4, 256, 4)]
ANY = [config(64, 16, 64, 4, aligned=False), config(None, 1, 1024, 4, aligned=False)]
FORWARD_CONFIGS = [*NARROW, config(1024, 1, 1024, 4), config(None, 1, 2048, 4), *ANY]
# Tiles of 2048 hold twice the registers and take 599 us where these take 545 (16384 x 14336, bf16, H200).
BACKWARD_CONFIGS = [*NARROW, config(None, 1, 1024, 4), *ANY]

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
