"""xIELU, elementwise. Tiles and strides: ../elements.py.

The gradient may overwrite dy: each thread reads an element before it writes the element. Programs of backward go through
several tiles each, so that the two numbers' gradients are sums of few partial sums, in a fixed order.
"""

from dataclasses import replace

import triton
import triton.language as tl

from ..elements import DTYPES, ONE_ROW, SIZES, config, load_parameter, load_tile, program_tile, store_tile, tile_at
from ..functions import expm1_less_x, log1p
from ..rows import strides
from ..table import Kernel

NEEDS_DX = tl.constexpr(1)
NEEDS_DALPHA = tl.constexpr(2)
NEAR = tl.constexpr(-0.5)  # above this, a series replaces the exponential


@triton.jit
def softplus(alpha):
    return tl.where(alpha > 20, alpha, log1p(tl.exp(alpha)))


@triton.jit
def below(v, eps):
    """expm1(c) - v and expm1(c), and their slopes, for c = min(v, eps)."""
    c = tl.where(v > eps, eps, v)
    small = expm1_less_x(c)
    power = tl.exp(c)
    rise = tl.where(c > NEAR, small + c, power - 1)
    gap = tl.where(c > NEAR, small + (c - v), rise - v)
    return gap, rise, tl.where(v > eps, -1.0, rise), tl.where(v > eps, 0.0, tl.where(c > NEAR, 1 + rise, power))


@triton.jit
def xielu_fwd_kernel(
    y, x, alpha_p, alpha_n, wide_p, wide_n,
    rows, n, inner_rows, y_outer, y_inner, x_outer, x_inner, beta, eps,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = program_tile(rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
    v = load_tile(x, tile, inner_rows, x_outer, x_inner, ONE_ROW, BLOCK_N).to(tl.float32)
    at_p, at_n = load_parameter(alpha_p, wide_p, 0, True), load_parameter(alpha_n, wide_n, 0, True)
    p, s = softplus(at_p), softplus(at_n)
    gap, rise, _, _ = below(v, eps)
    out = tl.where(v > 0, (p * v + beta) * v, s * gap + beta * rise)
    store_tile(y, out, tile, inner_rows, y_outer, y_inner, ONE_ROW, BLOCK_N)


@triton.jit
def xielu_bwd_kernel(
    dx, partial, dy, x, alpha_p, alpha_n, wide_p, wide_n,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner, beta, eps, flags,
    ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """partial: (2, programs), the gradients of alpha_p and alpha_n."""
    at_p, at_n = load_parameter(alpha_p, wide_p, 0, True), load_parameter(alpha_n, wide_n, 0, True)
    p, s = softplus(at_p), softplus(at_n)
    sum_p, sum_n = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    tiles = (tl.cdiv(rows, BLOCK_M) * tl.cdiv(n, BLOCK_N)).to(tl.int32)
    for program in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tile_at(program, rows, n, ONE_ROW, BLOCK_M, BLOCK_N)
        v = load_tile(x, tile, inner_rows, x_outer, x_inner, ONE_ROW, BLOCK_N).to(tl.float32)
        d = load_tile(dy, tile, inner_rows, dy_outer, dy_inner, ONE_ROW, BLOCK_N).to(tl.float32)
        gap, _, gap_slope, rise_slope = below(v, eps)
        if (flags & NEEDS_DX) != 0:
            out = d * tl.where(v > 0, 2 * p * v + beta, s * gap_slope + beta * rise_slope)
            store_tile(dx, out, tile, inner_rows, dx_outer, dx_inner, ONE_ROW, BLOCK_N)
        sum_p += tl.where(v > 0, d * v * v, 0.0)
        sum_n += tl.where(v > 0, 0.0, d * gap)
    if (flags & NEEDS_DALPHA) != 0:
        total_p, total_n = tl.sum(tl.sum(sum_p, 1), 0), tl.sum(tl.sum(sum_n, 1), 0)
        to = partial + tl.program_id(0)
        tl.store(to, total_p / (1 + tl.exp(-at_p)))
        tl.store(to + tl.num_programs(0), total_n / (1 + tl.exp(-at_n)))


NUMBERS = {"alpha_p": "*A", "alpha_n": "*A", "wide_p": "*fp32", "wide_n": "*fp32"}
CHOICES = [{**choice, "A": choice["X"]} for choice in DTYPES]
OPTIONS = {"beta": "fp32", "eps": "fp32"}
# Without the configs for narrow strided rows, which an activation seldom has.
CONFIGS = [ONE_ROW, config(None, 1, 1024, 4), config(None, 1, 1024, 4, aligned=False)]
PROGRAMS_PER_SM = 4

KERNELS = [
    Kernel(
        function=xielu_fwd_kernel,
        args={"y": "*X", "x": "*X", **NUMBERS, **SIZES, **strides("y", "x"), **OPTIONS},
        aligned=["y", "x", "n", *strides("y", "x")],
        axes={"dtype": CHOICES},
        configs=CONFIGS,
    ),
    Kernel(
        function=xielu_bwd_kernel,
        args={
            "dx": "*X", "partial": "*fp32", "dy": "*X", "x": "*X", **NUMBERS, **SIZES, **strides("dx", "dy", "x"), **OPTIONS,
            "flags": "i32",
        },
        aligned=["dx", "dy", "x", "n", *strides("dx", "dy", "x")],
        axes={"dtype": CHOICES},
        configs=[replace(c, num_warps=8, programs_per_sm=PROGRAMS_PER_SM) for c in CONFIGS],
    ),
]  # fmt: skip
