"""Decay and step of the delta rule: g = -exp(a_log) * softplus(a + dt_bias), or lower_bound * sigmoid(exp(a_log) *
(a + dt_bias)), and beta = beta_scale * sigmoid(b).

A row of a has n columns, `channels` for each head; a row of b has one number for each head. A program takes BLOCK_N columns
of a, and b of the heads that begin among them. Programs of backward go through several blocks of rows, so that the gradients
of the parameters are sums of few partial sums, in a fixed order.
"""

import triton
import triton.language as tl

from ..functions import log1p
from ..table import ACTIVATION_WEIGHT_DTYPES, Config, Kernel

HAS_BIAS = tl.constexpr(1)
HAS_BOUND = tl.constexpr(2)
NEEDS_DA = tl.constexpr(4)
NEEDS_DB = tl.constexpr(8)
NEEDS_SUMS = tl.constexpr(16)


@triton.jit
def columns_of(block, n, channels, a_log, dt_bias, flags, BLOCK_N: tl.constexpr):
    """Of a block of columns, (1, BLOCK_N): columns, their heads, whether a head begins, exp(a_log) and dt_bias."""
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    head = cols // channels
    rate = tl.exp(tl.load(a_log + head, mask=cols < n, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + cols, mask=(cols < n) & ((flags & HAS_BIAS) != 0), other=0.0).to(tl.float32)
    return cols, head, (cols < n) & (cols == head * channels), rate, bias


@triton.jit
def softplus(u):
    return tl.where(u < 0, 0.0, u) + log1p(tl.exp(-tl.abs(u)))


@triton.jit
def sigmoid_and_slope(v):
    # The slope as s * (1 - s) would lose digits.
    e = tl.exp(-tl.abs(v))
    r = 1.0 / (1.0 + e)
    return tl.where(v < 0, e * r, r), e * r * r


@triton.jit
def delta_gates_fwd_kernel(
    g, beta, a, b, a_log, dt_bias,
    rows, n, channels, a_row, b_row, lower_bound, beta_scale, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n, BLOCK_N)
    row_block = tl.program_id(0) // blocks
    cols, head, begins, rate, bias = columns_of(
        tl.program_id(0) - row_block * blocks, n, channels, a_log, dt_bias, flags, BLOCK_N
    )
    row = (row_block * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    mask = (row < rows) & (cols < n)
    u = tl.load(a + row * a_row + cols, mask=mask, other=0.0).to(tl.float32) + bias
    if (flags & HAS_BOUND) != 0:
        out = lower_bound * tl.sigmoid(rate * u)
    else:
        out = -rate * softplus(u)
    tl.store(g + row * n + cols, out, mask=mask)
    v = tl.load(b + row * b_row + head, mask=(row < rows) & begins, other=0.0).to(tl.float32)
    step = beta_scale * tl.sigmoid(v)
    tl.store(beta + row * (n // channels) + head, step.to(beta.dtype.element_ty), mask=(row < rows) & begins)


@triton.jit
def delta_gates_bwd_kernel(
    da, db, partial, dg, dbeta, a, b, a_log, dt_bias,
    rows, n, channels, a_row, b_row, dg_row, dbeta_row, lower_bound, beta_scale, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """partial: (2, programs of a block of columns, n), the gradients of a_log, for each channel, and of dt_bias."""
    blocks = tl.cdiv(n, BLOCK_N)
    share = tl.program_id(0) // blocks
    cols, head, begins, rate, bias = columns_of(
        tl.program_id(0) - share * blocks, n, channels, a_log, dt_bias, flags, BLOCK_N
    )
    sum_rate, sum_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS):
        row = ((share * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
        if (flags & NEEDS_DA) != 0 or (flags & NEEDS_SUMS) != 0:
            mask = (row < rows) & (cols < n)
            u = tl.load(a + row * a_row + cols, mask=mask, other=0.0).to(tl.float32) + bias
            d = tl.load(dg + row * dg_row + cols, mask=mask, other=0.0)
            if (flags & HAS_BOUND) != 0:
                _, slope = sigmoid_and_slope(rate * u)
                du = d * (lower_bound * rate * slope)
                sum_rate += du * u
            else:
                share_of_u, _ = sigmoid_and_slope(u)
                du = -d * rate * share_of_u
                sum_rate += -d * rate * softplus(u)
            sum_bias += du
            tl.store(da + row * n + cols, du.to(da.dtype.element_ty), mask=mask & ((flags & NEEDS_DA) != 0))
        if (flags & NEEDS_DB) != 0:
            wanted = (row < rows) & begins
            v = tl.load(b + row * b_row + head, mask=wanted, other=0.0).to(tl.float32)
            d = tl.load(dbeta + row * dbeta_row + head, mask=wanted, other=0.0).to(tl.float32)
            _, slope = sigmoid_and_slope(v)
            dv = d * (beta_scale * slope)
            tl.store(db + row * (n // channels) + head, dv.to(db.dtype.element_ty), mask=wanted)
    if (flags & NEEDS_SUMS) != 0:
        col = tl.reshape(cols, [BLOCK_N])
        to = partial + share.to(tl.int64) * n + col
        shares = (tl.num_programs(0) // blocks).to(tl.int64)
        tl.store(to, tl.sum(sum_rate, 0), mask=col < n)
        tl.store(to + shares * n, tl.sum(sum_bias, 0), mask=col < n)


SIZES = {"rows": "i32", "n": "i32", "channels": "i32", "a_row": "i64", "b_row": "i64"}
OPTIONS = {"lower_bound": "fp32", "beta_scale": "fp32", "flags": "i32"}
AXES = {"dtype": ACTIVATION_WEIGHT_DTYPES}


def config(max_n, block_m, block_n, steps, aligned=True):
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n) | ({"STEPS": steps} if steps else {})
    return Config(max_n, aligned, 4, constexprs=constexprs)


def configs(narrow=0, wide=0):
    return [config(64, 16, 64, narrow), config(None, 2, 512, wide), config(None, 4, 128, wide, aligned=False)]


KERNELS = [
    Kernel(
        function=delta_gates_fwd_kernel,
        args={"g": "*fp32", "beta": "*X", "a": "*X", "b": "*X", "a_log": "*W", "dt_bias": "*W", **SIZES, **OPTIONS},
        aligned=["g", "a", "dt_bias", "n", "a_row"],
        axes=AXES,
        configs=configs(),
    ),
    Kernel(
        function=delta_gates_bwd_kernel,
        args={
            "da": "*X", "db": "*X", "partial": "*fp32", "dg": "*fp32", "dbeta": "*X", "a": "*X", "b": "*X",
            "a_log": "*W", "dt_bias": "*W", **SIZES, "dg_row": "i64", "dbeta_row": "i64", **OPTIONS,
        },
        aligned=["da", "partial", "dg", "a", "dt_bias", "n", "a_row", "dg_row"],
        axes=AXES,
        configs=configs(narrow=4, wide=32),
    ),
]  # fmt: skip
