"""Tiles of rows of experts, and the activation of a tile: shared by the kernels of moe_experts, of its rows and adapters."""

import triton
import triton.language as tl

from ..gated.geglu import gelu_weight, gelu_weight_and_slope
from ..gated.swiglu import clamp, sigmoid_and_slope
from ..linear.lora_products import RANK_STEP

TILE_ROWS = tl.constexpr(128)
ROUTE_BLOCK = tl.constexpr(256)  # pairs of one program of the routing kernels
MAX_EXPERTS = tl.constexpr(4096)

ADAPTER_PIECES = tl.constexpr(3)  # of a packed adapter in 16 bits

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

ACTIVATIONS = [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}]
GATES = [{"GATE": SILU.value}, {"GATE": GELU.value}]
ROUTES = {"offsets": "*i32", "tiles": "*i32"}
GATE = {"alpha": "fp32", "limit": "fp32", "up_offset": "fp32", "flags": "i32"}


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
def with_adapter(total, v, packed, expert, row, columns, exists, features, padded):
    """total + v times the expert's adapter, for these rows and columns. v: (rows, pieces, padded), the first two pieces;
    packed: (experts, features, ADAPTER_PIECES, padded). In fp32 both have one piece."""
    WIDE: tl.constexpr = v.dtype.element_ty == tl.float32
    V_PIECES: tl.constexpr = 1 if WIDE else 2
    W_PIECES: tl.constexpr = 1 if WIDE else ADAPTER_PIECES
    v += row.to(tl.int64)[:, None] * (V_PIECES * padded)
    packed += (expert * features + columns)[None, :] * (W_PIECES * padded)
    for start in range(0, padded, RANK_STEP):
        rank = start + tl.arange(0, RANK_STEP)
        left, right = v + rank[None, :], packed + rank[:, None]
        high = tl.load(right, mask=exists[None, :], other=0.0)
        if WIDE:
            total = tl.dot(tl.load(left), high, total, input_precision="ieee")
        else:
            left_high = tl.load(left)
            total = tl.dot(tl.load(left + padded), high, total)
            total = tl.dot(left_high, tl.load(right + padded, mask=exists[None, :], other=0.0), total)
            total = tl.dot(left_high, high, total)
    return total


@triton.jit
def alternate(tile, N: tl.constexpr):
    """The even and the odd columns of a tile of 2 N columns."""
    return tl.split(tl.reshape(tile, [tile.shape[0], N, 2]))


@triton.jit
def store_halves(to, gate, up, cols, inner, mask):
    mask = mask[:, None] & (cols < inner)[None, :]
    tl.store(to + cols[None, :], gate, mask=mask)
    tl.store(to + (inner + cols)[None, :], up, mask=mask)


@triton.jit
def activation(gate, up, alpha, limit, up_offset, flags, GATE: tl.constexpr):
    gate, up = clamp(gate, up, limit)
    if GATE == GELU:
        f = gate * gelu_weight(gate, flags, TAILS=False)
    else:
        f = gate * tl.sigmoid(alpha * gate)
    return (up + up_offset) * f


@triton.jit
def activation_and_slopes(gate, up, alpha, limit, up_offset, flags, GATE: tl.constexpr):
    """The activation and its derivatives with respect to gate and up."""
    g, u = clamp(gate, up, limit)
    if GATE == GELU:
        p, slope = gelu_weight_and_slope(g, flags, TAILS=False)
        f, slope = g * p, p + slope
    else:
        p, slope = sigmoid_and_slope(alpha * g)
        f, slope = g * p, p + alpha * g * slope
    u += up_offset
    return u * f, tl.where(gate > limit, 0.0, u * slope), tl.where(tl.abs(up) > limit, 0.0, f)


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
