"""relu(x)^2, elementwise. Tiles and strides: ../elements.py.

The gradient may overwrite dy: each thread reads an element before it writes the element. NaN stays NaN.
"""

import triton
import triton.language as tl

from ..elements import BACKWARD_CONFIGS, DTYPES, FORWARD_CONFIGS, SIZES, load_tile, program_tile, store_tile
from ..rows import strides
from ..table import Kernel


@triton.jit
def relu_squared_fwd_kernel(
    y, x,
    rows, n, inner_rows, y_outer, y_inner, x_outer, x_inner,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    v = load_tile(x, tile, inner_rows, x_outer, x_inner, ONE_ROW, BLOCK_N).to(tl.float32)
    store_tile(y, tl.where(v <= 0, 0.0, v * v), tile, inner_rows, y_outer, y_inner, ONE_ROW, BLOCK_N)


@triton.jit
def relu_squared_bwd_kernel(
    dx, dy, x,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    v = load_tile(x, tile, inner_rows, x_outer, x_inner, ONE_ROW, BLOCK_N).to(tl.float32)
    d = load_tile(dy, tile, inner_rows, dy_outer, dy_inner, ONE_ROW, BLOCK_N).to(tl.float32)
    store_tile(dx, tl.where(v <= 0, 0.0, 2 * v * d), tile, inner_rows, dx_outer, dx_inner, ONE_ROW, BLOCK_N)


KERNELS = [
    Kernel(
        function=relu_squared_fwd_kernel,
        args={"y": "*X", "x": "*X", **SIZES, **strides("y", "x")},
        aligned=["y", "x", "n", *strides("y", "x")],
        axes={"dtype": DTYPES},
        configs=FORWARD_CONFIGS,
    ),
    Kernel(
        function=relu_squared_bwd_kernel,
        args={"dx": "*X", "dy": "*X", "x": "*X", **SIZES, **strides("dx", "dy", "x")},
        aligned=["dx", "dy", "x", "n", *strides("dx", "dy", "x")],
        axes={"dtype": DTYPES},
        configs=BACKWARD_CONFIGS,
    ),
]
