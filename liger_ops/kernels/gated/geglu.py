"""GeGLU: out = gelu(gate) * up, elementwise, with the tiles of swiglu.

gelu(x) = x * p(x), where p is the normal distribution's cdf ("none") or sigmoid(2 z) with
z = sqrt(2 / pi) * (x + 0.044715 x^3) ("tanh"). The sigmoid equals 0.5 * (1 + tanh(z)) and needs one exponential.
"""

import triton
import triton.language as tl

from ..elements import BACKWARD_CONFIGS, DTYPES, FORWARD_CONFIGS, load_tile, program_tile, store_tile
from ..functions import normal, sigmoid_of_power
from ..rows import LOG2E
from ..table import Kernel
from .swiglu import BACKWARD_ALIGNED, BACKWARD_ARGS, FORWARD_ALIGNED, FORWARD_ARGS, PRODUCT

TANH = tl.constexpr(1)

TWO_Z = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
CUBIC = tl.constexpr(0.044715)
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_1_OVER_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def tanh_weight_and_slope(x):
    """sigmoid(2 z) and its derivative with respect to 2 z."""
    return sigmoid_of_power(x * tl.fma(x * x, TWO_Z * CUBIC * LOG2E, TWO_Z * LOG2E))


@triton.jit
def gelu_weight(x, flags, TAILS: tl.constexpr = True):
    """p(x). TAILS: with its digits far below 0, which takes more registers."""
    if flags & TANH:
        p, _ = tanh_weight_and_slope(x)
    elif TAILS:
        p, _ = normal(x)
    else:
        p = 0.5 + 0.5 * tl.erf(x * SQRT_HALF)
    return p


@triton.jit
def gelu_weight_and_slope(x, flags, TAILS: tl.constexpr = True):
    """p(x) and x * p'(x)"""
    if flags & TANH:
        p, slope = tanh_weight_and_slope(x)
        slope = slope * x * tl.fma(x * x, 3.0 * TWO_Z * CUBIC, TWO_Z)
    elif TAILS:
        p, power = normal(x)
        slope = x * SQRT_1_OVER_2PI * power
    else:
        p = 0.5 + 0.5 * tl.erf(x * SQRT_HALF)
        slope = x * SQRT_1_OVER_2PI * tl.exp(-0.5 * x * x)
    return p, slope


@triton.jit
def geglu_fwd_kernel(
    out, gate, up,
    rows, n, inner_rows, out_outer, out_inner, gate_outer, gate_inner, up_outer, up_inner, flags,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    g = load_tile(gate, tile, inner_rows, gate_outer, gate_inner, ONE_ROW, BLOCK_N)
    u = load_tile(up, tile, inner_rows, up_outer, up_inner, ONE_ROW, BLOCK_N)
    g = g.to(tl.float32)
    result = g * gelu_weight(g, flags) * u.to(tl.float32)
    store_tile(out, result, tile, inner_rows, out_outer, out_inner, ONE_ROW, BLOCK_N)


@triton.jit
def geglu_bwd_kernel(
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
    p, slope = gelu_weight_and_slope(g, flags)
    dg = d * u * (p + slope)
    store_tile(dgate, dg, tile, inner_rows, dgate_outer, dgate_inner, ONE_ROW, BLOCK_N)
    store_tile(dup, d * g * p, tile, inner_rows, dup_outer, dup_inner, ONE_ROW, BLOCK_N)
    if flags & PRODUCT:
        store_tile(product, g * p * u, tile, inner_rows, dout_outer, dout_inner, ONE_ROW, BLOCK_N)


KERNELS = [
    Kernel(
        function=geglu_fwd_kernel,
        args=FORWARD_ARGS | {"flags": "i32"},
        aligned=FORWARD_ALIGNED,
        axes={"dtype": DTYPES},
        configs=FORWARD_CONFIGS,
    ),
    Kernel(
        function=geglu_bwd_kernel,
        args=BACKWARD_ARGS,
        aligned=BACKWARD_ALIGNED,
        axes={"dtype": DTYPES},
        configs=BACKWARD_CONFIGS,
    ),
]
