"""Rows of experts: routing data, and passes over rows beside the products of moe_experts.

Each of the `pairs` (token, choice) has a row. Rows are sorted by expert; within an expert they keep the order of the
pairs. Routing data, all int32:
    offsets    (experts + 1)   first row of every expert, and the number of rows; rows of dropped pairs do not exist
    tiles      (1 + 2 n)       number of tiles; then expert and first row of every tile of TILE_ROWS rows
    tokens     (pairs)         token of every row
    order      (pairs)         pair of every row
    position   (pairs)         row of every pair, -1 for a dropped one
No launch waits for the number of tiles: grids cover the most that there can be, and other programs return.

    combine       sum over the rows of every token, in the order of its choices
    route_bwd     d weight of every pair
    bias_bwd      gradients of biases: sums over the rows of every expert

Beside PyTorch's grouped GEMM, which takes the place of a product of moe_experts.py:

    gather        the rows of every expert, from those of the tokens
    act           act, and the final pre, from pre without bias
    act_rows_bwd  what act_bwd computes from d act
    clear_rest    zeros in rows of no expert
"""

import triton
import triton.language as tl

from ..table import Config, Kernel
from ._tiles import (
    ACTIVATIONS,
    GATE,
    GATES,
    GATHERS,
    HAS_BIAS,
    HAS_WEIGHT,
    INTERLEAVED,
    MAX_EXPERTS,
    ROUTE_BLOCK,
    ROUTES,
    TILE_ROWS,
    WANTS_WEIGHT,
    WEIGHT_FIRST,
    act_bwd_part,
    activation,
    alternate,
    rows_of,
    store_halves,
)

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
    offsets, tiles, counts, totals, pairs, experts, blocks, words, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr
):
    """One program per expert: its offset, its tiles, and counts turned into the first row of every block. totals: as the
    index of load_expert."""
    expert = tl.program_id(0)
    every = tl.arange(0, BLOCK_E)
    low = tl.load(totals + every * words, mask=every < experts, other=0)
    high = tl.load(totals + every * words + (words - 1), mask=every < experts, other=0)
    total = tl.where((words == 1) | (high == (low >> 31)), low, tl.where(high < 0, 0, pairs))
    # Counts of rows that are sorted already may be wrong. Within [0, pairs], not even their sum leaves the rows.
    total = tl.minimum(tl.maximum(total, 0), pairs).to(tl.int64)
    sums = tl.cumsum(total, 0)
    ends = tl.minimum(sums, pairs).to(tl.int32)
    starts = tl.minimum(sums - total, pairs).to(tl.int32)
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

GROUPED = [{"X": "bf16"}]  # dtypes of PyTorch's grouped GEMM that need no copy to the host

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
        args={**ROUTES, "counts": "*i32", "totals": "*i32", **dict.fromkeys(("pairs", "experts", "blocks", "words"), "i32")},
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
