"""Mixture of experts: grouped GEMMs. Rows and routing data: moe_rows.py.

Letters: T tokens, E experts, H hidden, I inner. gate_up: (E, 2 I, H), or (E, H, 2 I) if transposed; down: (E, H, I) or
(E, I, H). Columns of gate and up are halves of 2 I, or alternate (INTERLEAVED). `pre` has the columns of gate_up.

    up        pre = x[tokens] @ gate_up^T,  act = (up + up_offset) * f(gate)
    rows      y = act @ down^T;  backward: d x of every row = d pre @ gate_up
    act_bwd   d act = d out[tokens] @ down, then d pre (over pre) and d weight of every row
    weights   gradients of gate_up and down: sums over the rows of every expert

The first three add low-rank adapters as a last step (ADAPTS): v (rows, pieces, padded) times `packed`, which
moe_adapters.py describes.
"""

from dataclasses import replace

import triton
import triton.language as tl

from ..table import FLOATS, HALVES, Config, Kernel
from ._tiles import (
    ACTIVATIONS,
    GATE,
    GATES,
    HAS_BIAS,
    HAS_WEIGHT,
    INTERLEAVED,
    ROUTES,
    SAVES_PRE,
    TILE_ROWS,
    WANTS_WEIGHT,
    WEIGHT_FIRST,
    act_bwd_part,
    activation,
    alternate,
    place_of,
    rows_of,
    store_halves,
    with_adapter,
)

# How weights lie in memory.
SUM_FIRST = tl.constexpr(0)  # the dimension that a product sums over is contiguous
COLUMNS_FIRST = tl.constexpr(1)  # the columns of the product are contiguous
HALVES_APART = tl.constexpr(2)  # the same, and a tile's gate and up are two products


# ---- Tiles


@triton.jit
def multiply(a, w, exists, depth, w_row, N: tl.constexpr, SUM_IS_FIRST: tl.constexpr, BLOCK_K: tl.constexpr,
             STAGES: tl.constexpr):  # fmt: skip
    """a @ w. a: (TILE_ROWS, 1) pointers to rows; w: (1, N) pointers to columns, of which some exist."""
    total = tl.zeros([TILE_ROWS, N], tl.float32)
    k = tl.arange(0, BLOCK_K)
    stride = 1 if SUM_IS_FIRST else w_row
    a_at, w_at = a + k[None, :], w + k[:, None] * stride
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        inside = k < depth - start
        a_tile = tl.load(a_at, mask=inside[None, :], other=0.0)
        w_tile = tl.load(w_at, mask=inside[:, None] & exists[None, :], other=0.0)
        total = tl.dot(a_tile, w_tile, total, input_precision="ieee")
        a_at += BLOCK_K
        w_at += BLOCK_K * stride
    return total


@triton.jit
def multiply_two(a, w0, w1, exists, depth, w_row, N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """a @ w0 and a @ w1, whose columns are contiguous."""
    total0, total1 = tl.zeros([TILE_ROWS, N], tl.float32), tl.zeros([TILE_ROWS, N], tl.float32)
    k = tl.arange(0, BLOCK_K)
    a_at, w0_at, w1_at = a + k[None, :], w0 + k[:, None] * w_row, w1 + k[:, None] * w_row
    for start in tl.range(0, depth, BLOCK_K, num_stages=STAGES):
        inside = k < depth - start
        mask = inside[:, None] & exists[None, :]
        a_tile = tl.load(a_at, mask=inside[None, :], other=0.0)
        total0 = tl.dot(a_tile, tl.load(w0_at, mask=mask, other=0.0), total0, input_precision="ieee")
        total1 = tl.dot(a_tile, tl.load(w1_at, mask=mask, other=0.0), total1, input_precision="ieee")
        a_at += BLOCK_K
        w0_at += BLOCK_K * w_row
        w1_at += BLOCK_K * w_row
    return total0, total1


# ---- Products


@triton.jit
def moe_experts_up_kernel(
    act, pre, x, gate_up, bias, weight, offsets, tiles, tokens, order,
    most_tiles, hidden, inner, x_row, w_expert, w_row, alpha, limit, up_offset, flags, v, packed, padded,
    LAYOUT: tl.constexpr, GATE: tl.constexpr, ADAPTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_N // 2
    tile, column = place_of(most_tiles, tl.cdiv(inner, HALF), GROUP)
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets)
    a = x + tl.load(tokens + row).to(tl.int64)[:, None] * x_row
    w = gate_up + expert * w_expert
    bias += expert * 2 * inner
    has_bias = (flags & HAS_BIAS) != 0
    cols = column * HALF + tl.arange(0, HALF)
    dtype = act.dtype.element_ty
    if LAYOUT == HALVES_APART:
        gate, up = multiply_two(
            a, w + cols[None, :], w + (inner + cols)[None, :], cols < inner, hidden, w_row, HALF, BLOCK_K, STAGES
        )
        if ADAPTS:
            exists = cols < inner
            gate = with_adapter(gate, v, packed, expert, row, cols, exists, 2 * inner, padded)
            up = with_adapter(up, v, packed, expert, row, inner + cols, exists, 2 * inner, padded)
        gate += tl.load(bias + cols, mask=has_bias & (cols < inner), other=0.0)[None, :]
        up += tl.load(bias + inner + cols, mask=has_bias & (cols < inner), other=0.0)[None, :]
        gate, up = gate.to(dtype), up.to(dtype)
    else:
        # Columns of gate and up alternate in a tile: each thread then has both of a pair.
        at = tl.arange(0, BLOCK_N)
        exists = column * BLOCK_N + at < 2 * inner
        if LAYOUT == COLUMNS_FIRST:
            w_column = column * BLOCK_N + at
            pair = multiply(a, w + w_column[None, :], exists, hidden, w_row, BLOCK_N, False, BLOCK_K, STAGES)
        else:
            apart = (at & 1) * inner + column * HALF + at // 2
            w_column = tl.where((flags & INTERLEAVED) != 0, column * BLOCK_N + at, apart)
            w_rows = w_column.to(tl.int64)[None, :] * w_row
            pair = multiply(a, w + w_rows, exists, hidden, w_row, BLOCK_N, True, BLOCK_K, STAGES)
        if ADAPTS:
            pair = with_adapter(pair, v, packed, expert, row, w_column, exists, 2 * inner, padded)
        pair += tl.load(bias + w_column, mask=has_bias & exists, other=0.0)[None, :]
        pair = pair.to(dtype)
        gate, up = alternate(pair, HALF)
    saves = inside & ((flags & SAVES_PRE) != 0)
    to = pre + row.to(tl.int64)[:, None] * (2 * inner)
    if LAYOUT == HALVES_APART:
        store_halves(to, gate, up, cols, inner, saves)
    elif flags & INTERLEAVED:
        all_cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
        tl.store(to + all_cols[None, :], pair, mask=saves[:, None] & (all_cols < 2 * inner)[None, :])
    else:
        store_halves(to, gate, up, cols, inner, saves)
    weighs = inside & ((flags & WEIGHT_FIRST) != 0)
    scale = tl.load(weight + tl.load(order + row), mask=weighs, other=1.0)[:, None]
    gate, up = gate.to(tl.float32) * scale, up.to(tl.float32) * scale
    result = activation(gate, up, alpha, limit, up_offset, flags, GATE)
    to = act + row.to(tl.int64)[:, None] * inner + cols[None, :]
    tl.store(to, result.to(dtype), mask=inside[:, None] & (cols < inner)[None, :])


@triton.jit
def moe_experts_rows_kernel(
    out, a, w, bias, offsets, tiles, most_tiles, depth, n, w_expert, w_row, flags, v, packed, padded,
    LAYOUT: tl.constexpr, ADAPTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out (rows, n) = a (rows, depth) @ w of the rows' expert, plus its bias."""
    tile, column = place_of(most_tiles, tl.cdiv(n, BLOCK_N), GROUP)
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, row = row, row.to(tl.int64)[:, None]
    w_cols = cols.to(tl.int64) * w_row if LAYOUT == SUM_FIRST else cols
    w += expert * w_expert
    total = multiply(
        a + row * depth, w + w_cols[None, :], cols < n, depth, w_row, BLOCK_N, LAYOUT == SUM_FIRST, BLOCK_K, STAGES
    )
    if ADAPTS:
        total = with_adapter(total, v, packed, expert, rows, cols, cols < n, n, padded)
    total += tl.load(bias + expert * n + cols, mask=((flags & HAS_BIAS) != 0) & (cols < n), other=0.0)[None, :]
    tl.store(out + row * n + cols[None, :], total.to(out.dtype.element_ty), mask=inside[:, None] & (cols < n)[None, :])


@triton.jit
def columns_in_two(tile, N: tl.constexpr):
    """The first and the last N columns of a tile of 2 N columns."""
    return tl.split(tl.permute(tl.reshape(tile, [TILE_ROWS, 2, N]), (0, 2, 1)))


@triton.jit
def moe_experts_act_bwd_kernel(
    dpre, act, shares, pre, dout, down, weight, offsets, tiles, tokens, order,
    most_tiles, pairs, hidden, inner, dout_row, w_expert, w_row, alpha, limit, up_offset, flags, v, packed, padded,
    LAYOUT: tl.constexpr, GATE: tl.constexpr, ADAPTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dpre may be pre. act: what the gradient of down multiplies d out with; shares: (column tiles, pairs), of d
    weight. A tile is finished in PARTS parts, because all of it would not fit into registers."""
    tile, column = place_of(most_tiles, tl.cdiv(inner, BLOCK_N), GROUP)
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    a = dout + tl.load(tokens + row).to(tl.int64)[:, None] * dout_row
    w_cols = cols.to(tl.int64) * w_row if LAYOUT == SUM_FIRST else cols
    w = down + expert * w_expert + w_cols[None, :]
    dact = multiply(a, w, cols < inner, hidden, w_row, BLOCK_N, LAYOUT == SUM_FIRST, BLOCK_K, STAGES)
    if ADAPTS:
        dact = with_adapter(dact, v, packed, expert, row, cols, cols < inner, inner, padded)
    weighs = inside & ((flags & (HAS_WEIGHT | WEIGHT_FIRST)) != 0)
    scale = tl.load(weight + tl.load(order + row), mask=weighs, other=1.0)
    N: tl.constexpr = BLOCK_N // PARTS
    if PARTS == 2:
        part0, part1 = columns_in_two(dact, N)
        parts = (part0, part1)
    else:
        left, right = columns_in_two(dact, 2 * N)
        part0, part1 = columns_in_two(left, N)
        part2, part3 = columns_in_two(right, N)
        parts = (part0, part1, part2, part3)
    share = tl.zeros([TILE_ROWS], tl.float32)
    for i in tl.static_range(PARTS):
        share += act_bwd_part(
            dpre, act, pre, parts[i], row, inside, column * BLOCK_N + i * N, scale, inner, alpha, limit, up_offset,
            flags, GATE, N,
        )  # fmt: skip
    tl.store(shares + column.to(tl.int64) * pairs + row, share, mask=inside & ((flags & WANTS_WEIGHT) != 0))


@triton.jit
def moe_experts_weights_kernel(
    out, left, right, offsets, tokens, m, n, left_row, right_row,
    GATHER_LEFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out (experts, m, n): of every expert, the sum over its rows of left[row]^T right[row]. One of the two has a row
    per token."""
    column_tiles = tl.cdiv(n, BLOCK_N)
    tiles = column_tiles * tl.cdiv(m, BLOCK_M)
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) - expert * tiles
    m_tile = tile // column_tiles
    m_cols = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n_cols = (tile - m_tile * column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    k = tl.arange(0, BLOCK_K)
    for start in tl.range(tl.load(offsets + expert), end, BLOCK_K, num_stages=STAGES):
        inside = start + k < end
        token = tl.load(tokens + start + k, mask=inside, other=0)
        left_at = (token if GATHER_LEFT else start + k).to(tl.int64) * left_row
        right_at = (start + k if GATHER_LEFT else token).to(tl.int64) * right_row
        l_mask, r_mask = (m_cols < m)[:, None] & inside[None, :], inside[:, None] & (n_cols < n)[None, :]
        l_tile = tl.load(left + left_at[None, :] + m_cols[:, None], mask=l_mask, other=0.0)
        r_tile = tl.load(right + right_at[:, None] + n_cols[None, :], mask=r_mask, other=0.0)
        total = tl.dot(l_tile, r_tile, total, input_precision="ieee")
    to = out + expert.to(tl.int64) * m * n + m_cols.to(tl.int64)[:, None] * n + n_cols[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m_cols < m)[:, None] & (n_cols < n)[None, :])


# ---- Tables

WEIGHTS = {"w_expert": "i64", "w_row": "i64"}
ADAPTERS = {"v": "*X", "packed": "*X", "padded": "i32"}


def product(block_n, block_k, stages, *, aligned=True, warps=8, group=8, only=HALVES):
    sizes = dict(BLOCK_N=block_n, BLOCK_K=block_k, GROUP=group, STAGES=stages)
    return Config(None, aligned, warps, constexprs=sizes, only=only)


def sums(block_m, block_n, block_k, stages, *, aligned=True, warps=8, only=HALVES):
    sizes = dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages)
    return Config(None, aligned, warps, constexprs=sizes, only=only)


def layouts(*found):
    return [{"LAYOUT": layout.value} for layout in found]


def kernels_of_product(function, args, aligned, axes, configs, hopper_configs, hopper=("_hopper",)):
    """A kernel for every architecture, and those that compute capability 9.0 prefers: one per product, so that each is
    tuned by itself."""
    halves = [choices for choices in ACTIVATIONS if choices["X"] != "fp32"]
    preferred = [
        Kernel(function, args, aligned, {"dtype": halves, **axes}, hopper_configs, archs=[90], suffix=suffix)
        for suffix in hopper
    ]
    return [Kernel(function, args, aligned, {"dtype": ACTIVATIONS, **axes}, configs), *preferred]


def finished_in(parts, config):
    return replace(config, constexprs={**config.constexprs, "PARTS": parts})


def for_ranks(adapts, config):
    """A config with or without the last step. Its width is the number of ranks."""
    return replace(config, max_n=None if adapts else 0, constexprs={**config.constexprs, "ADAPTS": adapts})


def both(config):
    return [for_ranks(0, config), for_ranks(1, config)]


# To save space, tensors that are not aligned always have a last step, perhaps without ranks, and fp32 with adapters has no
# kernels of its own.
SMALL_PRODUCTS = [
    for_ranks(0, product(64, 32, 2, only=FLOATS)), for_ranks(1, product(64, 32, 2, aligned=False, only={}))
]  # fmt: skip
UNALIGNED_UP = for_ranks(1, product(32, 32, 2, aligned=False, only={}))

KERNELS = [
    *kernels_of_product(
        moe_experts_up_kernel,
        {
            "act": "*X", "pre": "*X", "x": "*X", "gate_up": "*X", "bias": "*fp32", "weight": "*fp32", **ROUTES,
            "tokens": "*i32", "order": "*i32", "most_tiles": "i32", "hidden": "i32", "inner": "i32", "x_row": "i64",
            **WEIGHTS, **GATE, **ADAPTERS,
        },
        ["act", "pre", "x", "gate_up", "hidden", "inner", "x_row", "w_expert", "w_row", *ADAPTERS],
        {"layout": layouts(SUM_FIRST, COLUMNS_FIRST, HALVES_APART), "gate": GATES},
        [*both(product(128, 32, 5)), SMALL_PRODUCTS[0], UNALIGNED_UP],
        [*both(product(256, 64, 4)), UNALIGNED_UP],
    ),
    *kernels_of_product(
        moe_experts_rows_kernel,
        {
            "out": "*X", "a": "*X", "w": "*X", "bias": "*fp32", **ROUTES, "most_tiles": "i32", "depth": "i32",
            "n": "i32", **WEIGHTS, "flags": "i32", **ADAPTERS,
        },
        ["out", "a", "w", "depth", "n", "w_expert", "w_row", *ADAPTERS],
        {"layout": layouts(SUM_FIRST, COLUMNS_FIRST)},
        [*both(product(256, 32, 4)), *SMALL_PRODUCTS],
        [*both(product(256, 64, 4)), SMALL_PRODUCTS[-1]],
        ("_hopper", "_bwd_hopper"),
    ),
    *kernels_of_product(
        moe_experts_act_bwd_kernel,
        {
            "dpre": "*X", "act": "*X", "shares": "*fp32", "pre": "*X", "dout": "*X", "down": "*X", "weight": "*fp32",
            **ROUTES, "tokens": "*i32", "order": "*i32", "most_tiles": "i32", "pairs": "i32", "hidden": "i32",
            "inner": "i32", "dout_row": "i64", **WEIGHTS, **GATE, **ADAPTERS,
        },
        ["dpre", "act", "pre", "dout", "down", "hidden", "inner", "dout_row", "w_expert", "w_row", *ADAPTERS],
        {"layout": layouts(SUM_FIRST, COLUMNS_FIRST), "gate": GATES},
        [finished_in(4, config) for config in (*both(product(128, 32, 5)), *SMALL_PRODUCTS)],
        [finished_in(4, config) for config in (*both(product(128, 64, 4)), SMALL_PRODUCTS[-1])],
    ),
    *kernels_of_product(
        moe_experts_weights_kernel,
        {
            "out": "*X", "left": "*X", "right": "*X", "offsets": "*i32", "tokens": "*i32", "m": "i32", "n": "i32",
            "left_row": "i64", "right_row": "i64",
        },
        ["out", "left", "right", "m", "n", "left_row", "right_row"],
        {"gathered": [{"GATHER_LEFT": 0}, {"GATHER_LEFT": 1}]},
        [sums(128, 256, 32, 7), sums(128, 64, 32, 2, only=FLOATS), sums(128, 64, 32, 2, aligned=False, only={})],
        [sums(128, 256, 64, 7), sums(128, 64, 32, 2, aligned=False, only={})],
        ("_gate_up_hopper", "_down_hopper"),
    ),
]  # fmt: skip
