"""Mixture of experts: routing data and grouped GEMMs.

Each of the `pairs` (token, choice) has a row. Rows are sorted by expert; within an expert they keep the order of the
pairs. Routing data, all int32:
    offsets    (experts + 1)   first row of every expert, and the number of rows; rows of dropped pairs do not exist
    tiles      (1 + 2 n)       number of tiles; then expert and first row of every tile of TILE_ROWS rows
    tokens     (pairs)         token of every row
    order      (pairs)         pair of every row
    position   (pairs)         row of every pair, -1 for a dropped one
No launch waits for the number of tiles: grids cover the most that there can be, and other programs return.

Letters: T tokens, E experts, H hidden, I inner. gate_up: (E, 2 I, H), or (E, H, 2 I) if transposed; down: (E, H, I) or
(E, I, H). Columns of gate and up are halves of 2 I, or alternate (INTERLEAVED). `pre` has the columns of gate_up.

    up        pre = x[tokens] @ gate_up^T,  act = (up + up_offset) * f(gate)
    rows      y = act @ down^T;  backward: d x of every row = d pre @ gate_up
    act_bwd   d act = d out[tokens] @ down, then d pre (over pre) and d weight of every row
    weights   gradients of gate_up and down: sums over the rows of every expert
    combine   sum over the rows of every token, in the order of its choices

Where the host takes PyTorch's grouped GEMM for a product, these remain:
    gather        the rows of every expert, from those of the tokens
    act           act, and the final pre, from pre without bias
    act_rows_bwd  what act_bwd computes from d act
    clear_rest    zeros in rows of no expert
"""

from dataclasses import replace

import triton
import triton.language as tl

from ..gated.geglu import gelu_weight, gelu_weight_and_slope
from ..gated.swiglu import sigmoid_and_slope
from ..table import FLOATS, HALVES, Config, Kernel

TILE_ROWS = tl.constexpr(128)
ROUTE_BLOCK = tl.constexpr(256)  # pairs of one program of the routing kernels
MAX_EXPERTS = tl.constexpr(4096)

# Flags, beside TANH of geglu.
INTERLEAVED = tl.constexpr(4)
WEIGHT_FIRST = tl.constexpr(8)  # the routing weight scales x, not the result
HAS_WEIGHT = tl.constexpr(16)
HAS_BIAS = tl.constexpr(32)
SAVES_PRE = tl.constexpr(64)
SAVES_ACT = tl.constexpr(128)
WANTS_WEIGHT = tl.constexpr(256)
GATHERS = tl.constexpr(512)

# Which f.
SILU = tl.constexpr(0)
GELU = tl.constexpr(1)

# How weights lie in memory.
SUM_FIRST = tl.constexpr(0)  # the dimension that a product sums over is contiguous
COLUMNS_FIRST = tl.constexpr(1)  # the columns of the product are contiguous
HALVES_APART = tl.constexpr(2)  # the same, and a tile's gate and up are two products


# ---- Routing


@triton.jit
def load_expert(index, pair, words, experts, mask):
    """The expert of a pair, -1 if it is dropped. index: int32, or int64 as two words."""
    at = index + pair.to(tl.int64) * words
    low = tl.load(at, mask=mask, other=-1)
    high = tl.load(at + (words - 1), mask=mask, other=-1)
    # The upper word of a small int64 repeats its sign, like all bits of a shifted int32.
    fits = (words == 1) | (high == (low >> 31))
    return tl.where(fits & (low >= 0) & (low < experts), low, -1)


@triton.jit
def moe_experts_count_kernel(counts, totals, index, pairs, experts, blocks, words, BINS: tl.constexpr):
    """counts: (experts, blocks) pairs of every expert in every block of pairs; totals: (experts,), zero before."""
    block = tl.program_id(0)
    pair = block * ROUTE_BLOCK + tl.arange(0, ROUTE_BLOCK)
    expert = load_expert(index, pair, words, experts, pair < pairs)
    for start in range(0, experts, BINS):
        bins = start + tl.arange(0, BINS)
        here = (expert >= start) & (expert < start + BINS)
        count = tl.histogram(tl.where(here, expert - start, 0), BINS, mask=here)
        inside = bins < experts
        tl.store(counts + bins.to(tl.int64) * blocks + block, count, mask=inside)
        tl.atomic_add(totals + bins, count, mask=inside & (count > 0), sem="relaxed")


@triton.jit
def moe_experts_scan_kernel(
    offsets, tiles, counts, totals, pairs, experts, blocks, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr
):
    """One program per expert: its offset, its tiles, and counts turned into the first row of every block."""
    expert = tl.program_id(0)
    every = tl.arange(0, BLOCK_E)
    total = tl.maximum(tl.load(totals + every, mask=every < experts, other=0), 0)
    # Rows that are sorted already may be fewer than their counts say.
    ends = tl.minimum(tl.cumsum(total, 0), pairs)
    starts = tl.minimum(tl.cumsum(total, 0) - total, pairs)
    rows = ends - starts
    own = tl.where(every == expert, 1, 0)
    start = tl.sum(own * starts)
    first_tile = tl.sum(tl.where(every < expert, (rows + TILE_ROWS - 1) // TILE_ROWS, 0))
    own_tiles = tl.cdiv(tl.sum(own * rows), TILE_ROWS)
    tl.store(offsets + expert, start)
    if expert == experts - 1:
        tl.store(offsets + experts, tl.sum(own * ends))
        tl.store(tiles, first_tile + own_tiles)
    for i in range(0, own_tiles, 128):
        tile = i + tl.arange(0, 128)
        at = tiles + 1 + 2 * (first_tile + tile)
        tl.store(at, expert, mask=tile < own_tiles)
        tl.store(at + 1, start + tile * TILE_ROWS, mask=tile < own_tiles)
    for i in range(0, blocks, BLOCK_P):
        block = i + tl.arange(0, BLOCK_P)
        at = counts + expert.to(tl.int64) * blocks + block
        count = tl.load(at, mask=block < blocks, other=0)
        tl.store(at, start + tl.cumsum(count, 0) - count, mask=block < blocks)
        start += tl.sum(count)


@triton.jit
def moe_experts_place_kernel(tokens, order, position, firsts, offsets, index, pairs, choices, experts, blocks, words):
    """firsts: (experts, blocks) row of each block's first pair of every expert. words 0: rows are sorted already."""
    block = tl.program_id(0)
    pair = block * ROUTE_BLOCK + tl.arange(0, ROUTE_BLOCK)
    inside = pair < pairs
    if words == 0:
        there = inside & (pair < tl.load(offsets + experts))
        tl.store(tokens + pair, pair, mask=inside)
        tl.store(order + pair, pair, mask=inside)
        tl.store(position + pair, tl.where(there, pair, -1), mask=inside)
    else:
        expert = load_expert(index, pair, words, experts, inside)
        known = expert >= 0
        row = tl.load(firsts + expert.to(tl.int64) * blocks + block, mask=known, other=0)
        for start in range(0, ROUTE_BLOCK, 16):
            other = block * ROUTE_BLOCK + start + tl.arange(0, 16)
            others = load_expert(index, other, words, experts, other < pairs)
            before = (others[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
            row += tl.sum(before.to(tl.int32), 1)
        tl.store(position + pair, tl.where(known, row, -1), mask=inside)
        tl.store(order + row, pair, mask=known)
        tl.store(tokens + row, pair // choices, mask=known)


# ---- Tiles


@triton.jit
def place_of(most_tiles, column_tiles, GROUP: tl.constexpr):
    """(tile of rows, tile of columns) of this program. Programs that run together share rows and weights in L2."""
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    inside = program - group * (GROUP * column_tiles)
    first = group * GROUP
    height = tl.minimum(most_tiles - first, GROUP)
    column = inside // height
    return first + inside - column * height, column


@triton.jit
def rows_of(tile, tiles, offsets, part=0, ROWS: tl.constexpr = TILE_ROWS):
    """(expert, rows, which of them exist) of a tile, or of a part of it. Rows beyond the expert's last repeat it, so that
    loads need no mask."""
    expert = tl.load(tiles + 1 + 2 * tile)
    row = tl.load(tiles + 2 + 2 * tile) + part * ROWS + tl.arange(0, ROWS)
    end = tl.load(offsets + expert + 1)
    return expert.to(tl.int64), tl.minimum(row, end - 1), row < end


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


@triton.jit
def alternate(tile, N: tl.constexpr):
    """The even and the odd columns of a tile of 2 N columns."""
    return tl.split(tl.reshape(tile, [tile.shape[0], N, 2]))


@triton.jit
def store_halves(to, gate, up, cols, inner, mask):
    mask = mask[:, None] & (cols < inner)[None, :]
    tl.store(to + cols[None, :], gate, mask=mask)
    tl.store(to + (inner + cols)[None, :], up, mask=mask)


# ---- Activations


@triton.jit
def activation(gate, up, alpha, limit, up_offset, flags, GATE: tl.constexpr):
    gate, up = clamp(gate, up, limit)
    if GATE == GELU:
        f = gate * gelu_weight(gate, flags)
    else:
        f = gate * tl.sigmoid(alpha * gate)
    return (up + up_offset) * f


@triton.jit
def activation_and_slopes(gate, up, alpha, limit, up_offset, flags, GATE: tl.constexpr):
    """The activation and its derivatives with respect to gate and up."""
    g, u = clamp(gate, up, limit)
    if GATE == GELU:
        p, slope = gelu_weight_and_slope(g, flags)
        f, slope = g * p, p + slope
    else:
        p, slope = sigmoid_and_slope(alpha * g)
        f, slope = g * p, p + alpha * g * slope
    u += up_offset
    return u * f, tl.where(gate > limit, 0.0, u * slope), tl.where(tl.abs(up) > limit, 0.0, f)


@triton.jit
def clamp(gate, up, limit):
    # tl.minimum would drop NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


# ---- Products


@triton.jit
def moe_experts_up_kernel(
    act, pre, x, gate_up, bias, weight, offsets, tiles, tokens, order,
    most_tiles, hidden, inner, x_row, w_expert, w_row, alpha, limit, up_offset, flags,
    LAYOUT: tl.constexpr, GATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
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
    out, a, w, bias, offsets, tiles, most_tiles, depth, n, w_expert, w_row, flags,
    LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (rows, n) = a (rows, depth) @ w of the rows' expert, plus its bias."""
    tile, column = place_of(most_tiles, tl.cdiv(n, BLOCK_N), GROUP)
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row.to(tl.int64)[:, None]
    w_cols = cols.to(tl.int64) * w_row if LAYOUT == SUM_FIRST else cols
    w += expert * w_expert
    total = multiply(
        a + row * depth, w + w_cols[None, :], cols < n, depth, w_row, BLOCK_N, LAYOUT == SUM_FIRST, BLOCK_K, STAGES
    )
    total += tl.load(bias + expert * n + cols, mask=((flags & HAS_BIAS) != 0) & (cols < n), other=0.0)[None, :]
    tl.store(out + row * n + cols[None, :], total.to(out.dtype.element_ty), mask=inside[:, None] & (cols < n)[None, :])


@triton.jit
def columns_in_two(tile, N: tl.constexpr):
    """The first and the last N columns of a tile of 2 N columns."""
    return tl.split(tl.permute(tl.reshape(tile, [TILE_ROWS, 2, N]), (0, 2, 1)))


@triton.jit
def act_bwd_part(
    dpre, act, pre, dact, row, inside, first_column, scale, inner, alpha, limit, up_offset, flags,
    GATE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N columns of d pre and act from d act. Returns their share of d weight."""
    cols = first_column + tl.arange(0, N)
    at = row.to(tl.int64)[:, None] * (2 * inner)
    mask = inside[:, None] & (cols < inner)[None, :]
    pair_cols = 2 * first_column + tl.arange(0, 2 * N)
    pair_mask = inside[:, None] & (pair_cols < 2 * inner)[None, :]
    if flags & INTERLEAVED:
        gate, up = alternate(tl.load(pre + at + pair_cols[None, :], mask=pair_mask, other=0.0), N)
    else:
        gate = tl.load(pre + at + cols[None, :], mask=mask, other=0.0)
        up = tl.load(pre + at + (inner + cols)[None, :], mask=mask, other=0.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    first = tl.where((flags & WEIGHT_FIRST) != 0, scale, 1.0)[:, None]
    last = tl.where((flags & WEIGHT_FIRST) != 0, 1.0, scale)[:, None]
    result, by_gate, by_up = activation_and_slopes(gate * first, up * first, alpha, limit, up_offset, flags, GATE)
    # Another thread may have read what a thread overwrites.
    tl.debug_barrier()
    to = act + row.to(tl.int64)[:, None] * inner + cols[None, :]
    tl.store(to, (result * last).to(act.dtype.element_ty), mask=mask & ((flags & SAVES_ACT) != 0))
    dgate, dup = dact * last * by_gate, dact * last * by_up
    share = tl.sum(tl.where((flags & WEIGHT_FIRST) != 0, dgate * gate + dup * up, dact * result), 1)
    dgate, dup = (dgate * first).to(dpre.dtype.element_ty), (dup * first).to(dpre.dtype.element_ty)
    if flags & INTERLEAVED:
        both = tl.reshape(tl.join(dgate, dup), [dgate.shape[0], 2 * N])
        tl.store(dpre + at + pair_cols[None, :], both, mask=pair_mask)
    else:
        store_halves(dpre + at, dgate, dup, cols, inner, inside)
    return share


@triton.jit
def moe_experts_act_bwd_kernel(
    dpre, act, shares, pre, dout, down, weight, offsets, tiles, tokens, order,
    most_tiles, pairs, hidden, inner, dout_row, w_expert, w_row, alpha, limit, up_offset, flags,
    LAYOUT: tl.constexpr, GATE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr, PARTS: tl.constexpr,
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


# ---- Beside PyTorch's grouped GEMM


@triton.jit
def moe_experts_gather_kernel(
    out, rows, tokens, offsets, experts, n, rows_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    blocks = tl.cdiv(n, BLOCK_N)
    block = tl.program_id(0) // blocks
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tl.program_id(0) - block * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = row < tl.load(offsets + experts)
    token = tl.load(tokens + row, mask=inside, other=0).to(tl.int64)
    mask = inside[:, None] & (cols < n)[None, :]
    found = tl.load(rows + token[:, None] * rows_row + cols[None, :], mask=mask)
    tl.store(out + row.to(tl.int64)[:, None] * n + cols[None, :], found, mask=mask)


@triton.jit
def moe_experts_clear_rest_kernel(rows, offsets, experts, pairs, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    first = tl.program_id(0) * BLOCK_M
    end = tl.load(offsets + experts)
    if first + BLOCK_M <= end:
        return
    row = first + tl.arange(0, BLOCK_M)
    at = rows + row.to(tl.int64)[:, None] * n
    for start in range(0, n, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        mask = ((row >= end) & (row < pairs))[:, None] & (cols < n)[None, :]
        tl.store(at + cols[None, :], tl.zeros([BLOCK_M, BLOCK_N], rows.dtype.element_ty), mask=mask)


@triton.jit
def part_of(column_tiles, tiles, ROWS: tl.constexpr):
    """(tile, its part of ROWS rows, tile of columns) of this program."""
    PARTS: tl.constexpr = TILE_ROWS // ROWS
    part = tl.program_id(0) // column_tiles
    return part // PARTS, part % PARTS, tl.program_id(0) - part * column_tiles


@triton.jit
def moe_experts_act_kernel(
    act, pre, bias, weight, offsets, tiles, order, inner, alpha, limit, up_offset, flags,
    GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, part, column = part_of(tl.cdiv(inner, BLOCK_N), tiles, BLOCK_M)
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets, part, BLOCK_M)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = inside[:, None] & (cols < inner)[None, :]
    at = pre + row.to(tl.int64)[:, None] * (2 * inner)
    bias += expert * 2 * inner
    has_bias = (flags & HAS_BIAS) != 0
    if flags & INTERLEAVED:
        pair_cols = 2 * column * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
        pair_mask = inside[:, None] & (pair_cols < 2 * inner)[None, :]
        pair = tl.load(at + pair_cols[None, :], mask=pair_mask, other=0.0)
        if has_bias:
            more = tl.load(bias + pair_cols, mask=pair_cols < 2 * inner, other=0.0)
            pair = (pair.to(tl.float32) + more[None, :]).to(act.dtype.element_ty)
            tl.store(at + pair_cols[None, :], pair, mask=pair_mask)
        gate, up = alternate(pair, BLOCK_N)
    else:
        gate = tl.load(at + cols[None, :], mask=mask, other=0.0)
        up = tl.load(at + (inner + cols)[None, :], mask=mask, other=0.0)
        if has_bias:
            more = tl.load(bias + cols, mask=cols < inner, other=0.0)
            gate = (gate.to(tl.float32) + more[None, :]).to(act.dtype.element_ty)
            more = tl.load(bias + inner + cols, mask=cols < inner, other=0.0)
            up = (up.to(tl.float32) + more[None, :]).to(act.dtype.element_ty)
            store_halves(at, gate, up, cols, inner, inside)
    weighs = inside & ((flags & WEIGHT_FIRST) != 0)
    scale = tl.load(weight + tl.load(order + row), mask=weighs, other=1.0)[:, None]
    result = activation(gate.to(tl.float32) * scale, up.to(tl.float32) * scale, alpha, limit, up_offset, flags, GATE)
    to = act + row.to(tl.int64)[:, None] * inner + cols[None, :]
    tl.store(to, result.to(act.dtype.element_ty), mask=mask)


@triton.jit
def moe_experts_act_rows_bwd_kernel(
    dpre, act, shares, pre, dact, weight, offsets, tiles, order, pairs, inner, alpha, limit, up_offset, flags,
    GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dpre may be pre, act may be dact. shares: (column tiles, pairs), of d weight."""
    tile, part, column = part_of(tl.cdiv(inner, BLOCK_N), tiles, BLOCK_M)
    if tile >= tl.load(tiles):
        return
    expert, row, inside = rows_of(tile, tiles, offsets, part, BLOCK_M)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = inside[:, None] & (cols < inner)[None, :]
    found = tl.load(dact + row.to(tl.int64)[:, None] * inner + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    weighs = inside & ((flags & (HAS_WEIGHT | WEIGHT_FIRST)) != 0)
    scale = tl.load(weight + tl.load(order + row), mask=weighs, other=1.0)
    share = act_bwd_part(
        dpre,
        act,
        pre,
        found,
        row,
        inside,
        column * BLOCK_N,
        scale,
        inner,
        alpha,
        limit,
        up_offset,
        flags,
        GATE,
        BLOCK_N,
    )
    tl.store(shares + column.to(tl.int64) * pairs + row, share, mask=inside & ((flags & WANTS_WEIGHT) != 0))


# ---- Sums


@triton.jit
def moe_experts_combine_kernel(out, rows, position, weight, choices, n, flags, BLOCK_N: tl.constexpr):
    """out (tokens, n): the weighted sum of each token's rows."""
    blocks = tl.cdiv(n, BLOCK_N)
    token = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - token * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in range(choices):
        pair = token * choices + choice
        row = tl.load(position + pair)
        factor = tl.load(weight + pair, mask=(flags & HAS_WEIGHT) != 0, other=1.0)
        part = tl.load(rows + row.to(tl.int64) * n + cols, mask=(row >= 0) & (cols < n), other=0.0)
        total += tl.where(row >= 0, factor * part.to(tl.float32), 0.0)
    tl.store(out + token.to(tl.int64) * n + cols, total.to(out.dtype.element_ty), mask=cols < n)


@triton.jit
def moe_experts_route_bwd_kernel(
    dweight, shares, position, dout, bias, index, pairs, choices, hidden, dout_row, tiles, experts, words, flags,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d weight of every pair: its shares, and d out times the bias of down."""
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = pair < pairs
    row = tl.load(position + pair, mask=inside, other=-1)
    total = tl.zeros([BLOCK_P], tl.float32)
    share_at = shares + row
    for _ in range(tiles):
        total += tl.load(share_at, mask=row >= 0, other=0.0)
        share_at += pairs
    if flags & HAS_BIAS:
        expert = load_expert(index, pair, words, experts, inside).to(tl.int64)
        at, bias_at = (pair // choices).to(tl.int64) * dout_row, expert * hidden
        by_bias = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
        for start in range(0, hidden, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            mask = (row >= 0)[:, None] & (cols < hidden)[None, :]
            d = tl.load(dout + at[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            by_bias += d * tl.load(bias + bias_at[:, None] + cols[None, :], mask=mask, other=0.0)
        total += tl.sum(by_bias, 1)
    tl.store(dweight + pair, total, mask=inside)


@triton.jit
def moe_experts_bias_bwd_kernel(
    dbias, rows, offsets, tokens, order, weight, n, rows_row, flags, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dbias (experts, n): the sum of each expert's rows, or, with the flag HAS_WEIGHT, of the weighted rows of their
    tokens."""
    blocks = tl.cdiv(n, BLOCK_N)
    expert = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - expert * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(tl.load(offsets + expert), end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        inside = row < end
        weighs = inside & ((flags & HAS_WEIGHT) != 0)
        factor = tl.load(weight + tl.load(order + row, mask=inside, other=0), mask=weighs, other=1.0)
        at = tl.where((flags & GATHERS) != 0, tl.load(tokens + row, mask=inside, other=0), row).to(tl.int64) * rows_row
        part = tl.load(rows + at[:, None] + cols[None, :], mask=inside[:, None] & (cols < n)[None, :], other=0.0)
        total += factor[:, None] * part.to(tl.float32)
    tl.store(dbias + expert.to(tl.int64) * n + cols, tl.sum(total, 0), mask=cols < n)


# ---- Tables

ACTIVATIONS = [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}]
GROUPED = [{"X": "bf16"}]  # dtypes of PyTorch's grouped GEMM that need no copy to the host
GATES = [{"GATE": SILU.value}, {"GATE": GELU.value}]
ROUTES = {"offsets": "*i32", "tiles": "*i32"}
WEIGHTS = {"w_expert": "i64", "w_row": "i64"}
GATE = {"alpha": "fp32", "limit": "fp32", "up_offset": "fp32", "flags": "i32"}


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


SMALL_PRODUCTS = [product(64, 32, 2, only=FLOATS), product(64, 32, 2, aligned=False, only={})]
UNALIGNED_UP = product(32, 32, 2, aligned=False, only={})

KERNELS = [
    Kernel(
        function=moe_experts_count_kernel,
        args={
            "counts": "*i32", "totals": "*i32", "index": "*i32", "pairs": "i32", "experts": "i32", "blocks": "i32",
            "words": "i32",
        },
        aligned=[],
        axes={"kind": [{"BINS": 128}]},
        configs=[Config(None, False, 4)],
    ),
    Kernel(
        function=moe_experts_scan_kernel,
        args={**ROUTES, "counts": "*i32", "totals": "*i32", "pairs": "i32", "experts": "i32", "blocks": "i32"},
        aligned=[],
        axes={"kind": [{"BLOCK_P": 1024}]},
        configs=[
            Config(128, False, 4, constexprs=dict(BLOCK_E=128)),
            Config(512, False, 4, constexprs=dict(BLOCK_E=512)),
            Config(None, False, 4, constexprs=dict(BLOCK_E=MAX_EXPERTS.value)),
        ],
    ),
    Kernel(
        function=moe_experts_place_kernel,
        args={
            "tokens": "*i32", "order": "*i32", "position": "*i32", "firsts": "*i32", "offsets": "*i32",
            "index": "*i32", "pairs": "i32", "choices": "i32", "experts": "i32", "blocks": "i32", "words": "i32",
        },
        aligned=[],
        axes={"kind": [{}]},
        configs=[Config(None, False, 4)],
    ),
    *kernels_of_product(
        moe_experts_up_kernel,
        {
            "act": "*X", "pre": "*X", "x": "*X", "gate_up": "*X", "bias": "*fp32", "weight": "*fp32", **ROUTES,
            "tokens": "*i32", "order": "*i32", "most_tiles": "i32", "hidden": "i32", "inner": "i32", "x_row": "i64",
            **WEIGHTS, **GATE,
        },
        ["act", "pre", "x", "gate_up", "hidden", "inner", "x_row", "w_expert", "w_row"],
        {"layout": layouts(SUM_FIRST, COLUMNS_FIRST, HALVES_APART), "gate": GATES},
        [product(128, 32, 5), SMALL_PRODUCTS[0], UNALIGNED_UP],
        [product(256, 64, 4), UNALIGNED_UP],
    ),
    *kernels_of_product(
        moe_experts_rows_kernel,
        {
            "out": "*X", "a": "*X", "w": "*X", "bias": "*fp32", **ROUTES, "most_tiles": "i32", "depth": "i32",
            "n": "i32", **WEIGHTS, "flags": "i32",
        },
        ["out", "a", "w", "depth", "n", "w_expert", "w_row"],
        {"layout": layouts(SUM_FIRST, COLUMNS_FIRST)},
        [product(256, 32, 4), *SMALL_PRODUCTS],
        [product(256, 64, 4), SMALL_PRODUCTS[-1]],
        ("_hopper", "_bwd_hopper"),
    ),
    *kernels_of_product(
        moe_experts_act_bwd_kernel,
        {
            "dpre": "*X", "act": "*X", "shares": "*fp32", "pre": "*X", "dout": "*X", "down": "*X", "weight": "*fp32",
            **ROUTES, "tokens": "*i32", "order": "*i32", "most_tiles": "i32", "pairs": "i32", "hidden": "i32",
            "inner": "i32", "dout_row": "i64", **WEIGHTS, **GATE,
        },
        ["dpre", "act", "pre", "dout", "down", "hidden", "inner", "dout_row", "w_expert", "w_row"],
        {"layout": layouts(SUM_FIRST, COLUMNS_FIRST), "gate": GATES},
        [finished_in(4, product(128, 32, 5)), *(finished_in(4, small) for small in SMALL_PRODUCTS)],
        [finished_in(4, product(128, 64, 4)), finished_in(4, SMALL_PRODUCTS[-1])],
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
    Kernel(
        function=moe_experts_gather_kernel,
        args={
            "out": "*X", "rows": "*X", "tokens": "*i32", "offsets": "*i32", "experts": "i32", "n": "i32",
            "rows_row": "i64",
        },
        aligned=["out", "rows", "n", "rows_row"],
        axes={"dtype": GROUPED},
        configs=[Config(None, True, 4, constexprs=dict(BLOCK_M=8, BLOCK_N=512))],
        archs=[90],
    ),
    Kernel(
        function=moe_experts_clear_rest_kernel,
        args={"rows": "*X", "offsets": "*i32", "experts": "i32", "pairs": "i32", "n": "i32"},
        aligned=["rows", "n"],
        axes={"dtype": GROUPED},
        configs=[Config(None, True, 4, constexprs=dict(BLOCK_M=16, BLOCK_N=256))],
        archs=[90],
    ),
    Kernel(
        function=moe_experts_act_kernel,
        args={
            "act": "*X", "pre": "*X", "bias": "*fp32", "weight": "*fp32", **ROUTES, "order": "*i32", "inner": "i32",
            **GATE,
        },
        aligned=["act", "pre", "inner"],
        axes={"dtype": GROUPED, "gate": GATES},
        configs=[Config(None, True, 4, constexprs=dict(BLOCK_M=4, BLOCK_N=256))],
        archs=[90],
    ),
    Kernel(
        function=moe_experts_act_rows_bwd_kernel,
        args={
            "dpre": "*X", "act": "*X", "shares": "*fp32", "pre": "*X", "dact": "*X", "weight": "*fp32", **ROUTES,
            "order": "*i32", "pairs": "i32", "inner": "i32", **GATE,
        },
        aligned=["dpre", "act", "pre", "dact", "inner"],
        axes={"dtype": GROUPED, "gate": GATES},
        configs=[Config(None, True, 2, constexprs=dict(BLOCK_M=2, BLOCK_N=256))],
        archs=[90],
    ),
    Kernel(
        function=moe_experts_combine_kernel,
        args={
            "out": "*X", "rows": "*X", "position": "*i32", "weight": "*fp32", "choices": "i32", "n": "i32",
            "flags": "i32",
        },
        aligned=["out", "rows", "n"],
        axes={"dtype": ACTIVATIONS},
        configs=[
            Config(None, True, 4, constexprs=dict(BLOCK_N=1024)),
            Config(None, False, 4, constexprs=dict(BLOCK_N=512)),
        ],
    ),
    Kernel(
        function=moe_experts_route_bwd_kernel,
        args={
            "dweight": "*fp32", "shares": "*fp32", "position": "*i32", "dout": "*X", "bias": "*fp32", "index": "*i32",
            "pairs": "i32", "choices": "i32", "hidden": "i32", "dout_row": "i64", "tiles": "i32", "experts": "i32",
            "words": "i32", "flags": "i32",
        },
        aligned=[],
        axes={"dtype": ACTIVATIONS},
        configs=[Config(None, False, 4, constexprs=dict(BLOCK_P=32, BLOCK_N=64))],
    ),
    Kernel(
        function=moe_experts_bias_bwd_kernel,
        args={
            "dbias": "*fp32", "rows": "*X", "offsets": "*i32", "tokens": "*i32", "order": "*i32", "weight": "*fp32",
            "n": "i32", "rows_row": "i64", "flags": "i32",
        },
        aligned=[],
        axes={"dtype": ACTIVATIONS},
        configs=[Config(None, False, 4, constexprs=dict(BLOCK_M=32, BLOCK_N=128))],
    ),
]  # fmt: skip
