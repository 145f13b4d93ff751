"""Decay and step of the delta rule: g = -exp(a_log) * softplus(a + dt_bias), or lower_bound * sigmoid(exp(a_log) *
(a + dt_bias)), and beta = beta_scale * sigmoid(b).

A row of a has n columns, `channels` for each head; a row of b has one number for each head. A program takes STEPS times UNROLL
blocks of rows, BLOCK_N columns of a, and as large a share of the heads of b. Loads of UNROLL blocks are in flight together.
Gradients of the parameters are sums of one partial sum of each program, in a fixed order.
"""

import triton
import triton.language as tl

from ..functions import log1p_of_fraction, sigmoid, sigmoid_and_slope
from ..rows import LOG2E
from ..table import ACTIVATION_WEIGHT_DTYPES, Config, Kernel

HAS_BIAS = tl.constexpr(1)
HAS_BOUND = tl.constexpr(2)
NEEDS_DA = tl.constexpr(4)
NEEDS_DB = tl.constexpr(8)
NEEDS_SUMS = tl.constexpr(16)


# Numbers of b that a program takes at a time.
BLOCK_B = tl.constexpr(256)


@triton.jit
def columns_of(block, n, channels, a_log, dt_bias, flags, BLOCK_N: tl.constexpr):
    """Of a block of columns, (1, BLOCK_N): columns, exp(a_log) and dt_bias."""
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    rate = tl.exp(tl.load(a_log + cols // channels, mask=cols < n, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + cols, mask=(cols < n) & ((flags & HAS_BIAS) != 0), other=0.0).to(tl.float32)
    return cols, rate, bias


@triton.jit
def rows_at(first, rows, cols, n, BLOCK_M: tl.constexpr):
    row = (first + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    return row, (row < rows) & (cols < n)


@triton.jit
def blocks_of_rows(t, stride, first, rows, cols, n, BLOCK_M: tl.constexpr, UNROLL: tl.constexpr):
    loaded = ()
    for i in tl.static_range(UNROLL):
        row, mask = rows_at(first + i * BLOCK_M, rows, cols, n, BLOCK_M)
        loaded = loaded + (tl.load(t + row * stride + cols, mask=mask, other=0.0),)
    return loaded


@triton.jit
def softplus(u):
    return tl.where(u < 0, 0.0, u) + log1p_of_fraction(tl.exp2(-tl.abs(u) * LOG2E))


@triton.jit
def steps_of(start, first_row, count, rows, block, per_block, heads):
    """Of the program's share of b, numbers start.. of its count rows: row, head, and whether they are there."""
    index = start + tl.arange(0, BLOCK_B)
    row = index // per_block
    head = block * per_block + index - row * per_block
    inside = (row < count) & (first_row + row < rows) & (head < heads)
    return (first_row + row).to(tl.int64), head, inside


@triton.jit
def delta_gates_fwd_kernel(
    g, beta, a, b, a_log, dt_bias,
    rows, n, channels, a_row, b_row, lower_bound, beta_scale, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n, BLOCK_N)
    row_block = tl.program_id(0) // blocks
    block = tl.program_id(0) - row_block * blocks
    cols, rate, bias = columns_of(block, n, channels, a_log, dt_bias, flags, BLOCK_N)
    first_row = row_block * (UNROLL * BLOCK_M)
    loaded = blocks_of_rows(a, a_row, first_row, rows, cols, n, BLOCK_M, UNROLL)
    for i in tl.static_range(UNROLL):
        row, mask = rows_at(first_row + i * BLOCK_M, rows, cols, n, BLOCK_M)
        u = loaded[i].to(tl.float32) + bias
        if (flags & HAS_BOUND) != 0:
            out = lower_bound * sigmoid(rate * u)
        else:
            out = -rate * softplus(u)
        tl.store(g + row * n + cols, out, mask=mask)
    heads = n // channels
    per_block = tl.cdiv(heads, blocks)
    for start in range(0, UNROLL * BLOCK_M * per_block, BLOCK_B):
        at, head, inside = steps_of(start, first_row, UNROLL * BLOCK_M, rows, block, per_block, heads)
        v = tl.load(b + at * b_row + head, mask=inside, other=0.0).to(tl.float32)
        tl.store(beta + at * heads + head, (beta_scale * sigmoid(v)).to(beta.dtype.element_ty), mask=inside)


@triton.jit
def delta_gates_bwd_kernel(
    da, db, partial, dg, dbeta, a, b, a_log, dt_bias,
    rows, n, channels, a_row, b_row, dg_row, dbeta_row, lower_bound, beta_scale, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """partial: (2, programs of a block of columns, n), the gradients of a_log, for each channel, and of dt_bias."""
    blocks = tl.cdiv(n, BLOCK_N)
    share = tl.program_id(0) // blocks
    block = tl.program_id(0) - share * blocks
    first_row = share * (STEPS * UNROLL * BLOCK_M)
    if (flags & (NEEDS_DA | NEEDS_SUMS)) != 0:
        cols, rate, bias = columns_of(block, n, channels, a_log, dt_bias, flags, BLOCK_N)
        sum_rate, sum_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(STEPS):
            first = first_row + step * (UNROLL * BLOCK_M)
            loaded = blocks_of_rows(a, a_row, first, rows, cols, n, BLOCK_M, UNROLL)
            grads = blocks_of_rows(dg, dg_row, first, rows, cols, n, BLOCK_M, UNROLL)
            for i in tl.static_range(UNROLL):
                row, mask = rows_at(first + i * BLOCK_M, rows, cols, n, BLOCK_M)
                u = loaded[i].to(tl.float32) + bias
                if (flags & HAS_BOUND) != 0:
                    _, slope = sigmoid_and_slope(rate * u)
                    du = grads[i] * (lower_bound * rate * slope)
                    sum_rate += du * u
                else:
                    scaled = -grads[i] * rate
                    du = scaled * sigmoid(u)
                    sum_rate += scaled * softplus(u)
                sum_bias += du
                tl.store(da + row * n + cols, du.to(da.dtype.element_ty), mask=mask & ((flags & NEEDS_DA) != 0))
        if (flags & NEEDS_SUMS) != 0:
            col = tl.reshape(cols, [BLOCK_N])
            to = partial + share.to(tl.int64) * n + col
            shares = (tl.num_programs(0) // blocks).to(tl.int64)
            tl.store(to, tl.sum(sum_rate, 0), mask=col < n)
            tl.store(to + shares * n, tl.sum(sum_bias, 0), mask=col < n)
    if (flags & NEEDS_DB) != 0:
        heads = n // channels
        per_block = tl.cdiv(heads, blocks)
        for start in range(0, STEPS * UNROLL * BLOCK_M * per_block, BLOCK_B):
            at, head, inside = steps_of(start, first_row, STEPS * UNROLL * BLOCK_M, rows, block, per_block, heads)
            v = tl.load(b + at * b_row + head, mask=inside, other=0.0).to(tl.float32)
            d = tl.load(dbeta + at * dbeta_row + head, mask=inside, other=0.0).to(tl.float32)
            _, slope = sigmoid_and_slope(v)
            tl.store(db + at * heads + head, (d * (beta_scale * slope)).to(db.dtype.element_ty), mask=inside)


SIZES = {"rows": "i32", "n": "i32", "channels": "i32", "a_row": "i64", "b_row": "i64"}
OPTIONS = {"lower_bound": "fp32", "beta_scale": "fp32", "flags": "i32"}
AXES = {"dtype": ACTIVATION_WEIGHT_DTYPES}


def config(max_n, block_m, block_n, unroll, steps, aligned=True):
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, UNROLL=unroll) | ({"STEPS": steps} if steps else {})
    return Config(max_n, aligned, 4, constexprs=constexprs)


def configs(narrow=0, wide=0):
    # A thread has 4 columns, so that those in 16 bits and those in 32 bits need no exchange.
    return [
        config(64, 16, 64, 1, narrow),
        config(None, 1, 512, 4, wide),
        config(None, 2, 128, 2, wide, aligned=False),
    ]


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
        configs=configs(narrow=4, wide=16),
    ),
]  # fmt: skip
