"""SwiGLU: out = silu(min(gate, limit)) * clamp(up, -limit, limit), elementwise.

Tiles and strides: ../elements.py. limit may be infinite.

Backward recomputes silu(gate). Its results may overwrite gate and up: each thread reads an element before it
writes the element. With PRODUCT it also stores the forward's result, which may overwrite dout.
"""

import triton
import triton.language as tl

from ..elements import BACKWARD_CONFIGS, DTYPES, FORWARD_CONFIGS, SIZES, load_tile, program_tile, store_tile
from ..functions import sigmoid, sigmoid_and_slope
from ..rows import strides
from ..table import Kernel

PRODUCT = tl.constexpr(256)


@triton.jit
def clamp(gate, up, limit):
    """Comparisons keep NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@triton.jit
def swiglu_fwd_kernel(
    out, gate, up,
    rows, n, inner_rows, out_outer, out_inner, gate_outer, gate_inner, up_outer, up_inner, limit,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    g = load_tile(gate, tile, inner_rows, gate_outer, gate_inner, ONE_ROW, BLOCK_N)
    u = load_tile(up, tile, inner_rows, up_outer, up_inner, ONE_ROW, BLOCK_N)
    g, u = clamp(g.to(tl.float32), u.to(tl.float32), limit)
    result = g * sigmoid(g) * u
    store_tile(out, result, tile, inner_rows, out_outer, out_inner, ONE_ROW, BLOCK_N)


@triton.jit
def swiglu_bwd_kernel(
    dgate, dup, product, dout, gate, up,
    rows, n, inner_rows, dgate_outer, dgate_inner, dup_outer, dup_inner, dout_outer, dout_inner,
    gate_outer, gate_inner, up_outer, up_inner, flags, limit,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    g = load_tile(gate, tile, inner_rows, gate_outer, gate_inner, ONE_ROW, BLOCK_N)
    u = load_tile(up, tile, inner_rows, up_outer, up_inner, ONE_ROW, BLOCK_N)
    d = load_tile(dout, tile, inner_rows, dout_outer, dout_inner, ONE_ROW, BLOCK_N)
    d = d.to(tl.float32)
    gate_before = g.to(tl.float32)
    up_before = u.to(tl.float32)
    g, u = clamp(gate_before, up_before, limit)
    s, slope = sigmoid_and_slope(g)
    dg = tl.where(gate_before > limit, 0.0, d * u * (s + g * slope))
    store_tile(dgate, dg, tile, inner_rows, dgate_outer, dgate_inner, ONE_ROW, BLOCK_N)
    du = tl.where(tl.abs(up_before) > limit, 0.0, d * g * s)
    store_tile(dup, du, tile, inner_rows, dup_outer, dup_inner, ONE_ROW, BLOCK_N)
    if flags & PRODUCT:
        store_tile(product, g * s * u, tile, inner_rows, dout_outer, dout_inner, ONE_ROW, BLOCK_N)


FORWARD_ARGS = {"out": "*X", "gate": "*X", "up": "*X", **SIZES, **strides("out", "gate", "up")}
BACKWARD_ARGS = {
    "dgate": "*X", "dup": "*X", "product": "*X", "dout": "*X", "gate": "*X", "up": "*X", **SIZES,
    **strides("dgate", "dup", "dout", "gate", "up"), "flags": "i32",
}  # fmt: skip
# rows and inner_rows are counts, not offsets.
FORWARD_ALIGNED = [a for a in FORWARD_ARGS if "rows" not in a]
BACKWARD_ALIGNED = [a for a in BACKWARD_ARGS if "rows" not in a and a != "flags"]

KERNELS = [
    Kernel(
        function=swiglu_fwd_kernel,
        args=FORWARD_ARGS | {"limit": "fp32"},
        aligned=FORWARD_ALIGNED,
        axes={"dtype": DTYPES},
        configs=FORWARD_CONFIGS,
    ),
    Kernel(
        function=swiglu_bwd_kernel,
        args=BACKWARD_ARGS | {"limit": "fp32"},
        aligned=BACKWARD_ALIGNED,
        axes={"dtype": DTYPES},
        configs=BACKWARD_CONFIGS,
    ),
]
