"""LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias.

Forward and backward have the same structure as in rms_norm.py, which explains tiles, loops and persistent programs.
The variance is summed over centred values that stay in registers: no cancellation, and no second read.
In wide rows, the mean of the centred values (`drift`) corrects the rounding error of the mean.
"""

from functools import partial

import triton
import triton.language as tl

from ..kept import lane_words, unpack
from ..rows import (
    PLAIN_HALVES,
    block_rows,
    load_parameter,
    load_parameter_tiles,
    load_per_row,
    load_tiles,
    prefetch,
    programs_ahead,
    row_mean,
    row_offset,
    rows_config,
    store_per_row,
    store_share,
    strides,
    zero_tiles,
)
from ..streamed import (
    LANE_BYTES,
    columns_left,
    fill_ring,
    first_lane,
    lane_columns,
    load_lane,
    make_ring,
    pieces_ahead,
    read_pair,
    refill,
    rotate_ring,
    row_start,
    slots_that_fit,
    store_gradient,
    store_lane,
    store_sums,
    wait_for_tiles,
    zero_sums,
)
from ..table import ACTIVATION_WEIGHT_DTYPES, FLOATS, HALVES, Kernel, fewer_when_mixed

HAS_WEIGHT = tl.constexpr(1)
HAS_BIAS = tl.constexpr(2)
SAVE_STATISTICS = tl.constexpr(4)
NEEDS_DWEIGHT = tl.constexpr(8)
NEEDS_DBIAS = tl.constexpr(16)
FINAL = tl.constexpr(32)


@triton.jit
def layer_norm_fwd_kernel(
    y, statistics, x, weight, bias,
    rows, n, inner_rows, y_outer, y_inner, x_outer, x_inner, eps, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    row = block_rows(tl.program_id(0), BLOCK_M)
    row_mask = row < rows
    x_row = x + row_offset(row, inner_rows, x_outer, x_inner)
    y_row = y + row_offset(row, inner_rows, y_outer, y_inner)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    if TILES > 0:
        if EARLY:
            weights = load_parameter_tiles(weight, n, flags & HAS_WEIGHT, 1.0, BLOCK_N, TILES)
            biases = load_parameter_tiles(bias, n, flags & HAS_BIAS, 0.0, BLOCK_N, TILES)
        xs = load_tiles(x_row, row_mask, n, BLOCK_N, TILES, EARLY)
        if AHEAD:
            later = row + programs_ahead(TILES * BLOCK_N * x.dtype.element_ty.primitive_bitwidth // 8)
            prefetch(x + row_offset(later, inner_rows, x_outer, x_inner), 0, tl.where(later < rows, n, 0))
        for t in tl.static_range(TILES):
            total += xs[t].to(tl.float32)
        mean = row_mean(total, n)
        drifts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for t in tl.static_range(TILES):
            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
            centred = tl.where((cols < n)[None, :], xs[t].to(tl.float32) - mean, 0.0)
            squares += centred * centred
            drifts += centred
        drift = mean * 0.0
        if TILES * BLOCK_N > 16384:
            drift = row_mean(drifts, n)
        scale = tl.rsqrt(row_mean(squares, n) - drift * drift + eps)
        for t in tl.static_range(TILES):
            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = row_mask & (cols < n)[None, :]
            if EARLY:
                w = weights[t].to(tl.float32)[None, :]
                b = biases[t].to(tl.float32)[None, :]
            else:
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :]
                b = load_parameter(bias, cols, n, flags & HAS_BIAS, 0.0)[None, :]
            normed = (xs[t].to(tl.float32) - mean - drift) * scale
            tl.store(y_row + cols[None, :], normed * w + b, mask=mask)
    else:
        for start in range(0, n, BLOCK_N):
            tile = load_tiles(x_row + start, row_mask, n - start, BLOCK_N, 1)
            total += tile[0].to(tl.float32)
        mean = row_mean(total, n)
        drifts = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, n, BLOCK_N):
            tile = load_tiles(x_row + start, row_mask, n - start, BLOCK_N, 1)
            cols = start + tl.arange(0, BLOCK_N)
            centred = tl.where((cols < n)[None, :], tile[0].to(tl.float32) - mean, 0.0)
            squares += centred * centred
            drifts += centred
        drift = row_mean(drifts, n)
        scale = tl.rsqrt(row_mean(squares, n) - drift * drift + eps)
        for start in range(0, n, BLOCK_N):
            tile = load_tiles(x_row + start, row_mask, n - start, BLOCK_N, 1)
            cols = start + tl.arange(0, BLOCK_N)
            mask = row_mask & (cols < n)[None, :]
            w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :]
            b = load_parameter(bias, cols, n, flags & HAS_BIAS, 0.0)[None, :]
            normed = (tile[0].to(tl.float32) - mean - drift) * scale
            tl.store(y_row + cols[None, :], normed * w + b, mask=mask)

    # statistics: (2, rows): means, then reciprocal standard deviations
    save = row_mask & ((flags & SAVE_STATISTICS) != 0)
    store_per_row(statistics, row, mean + drift, save, BLOCK_M)
    store_per_row(statistics + rows.to(tl.int64), row, scale, save, BLOCK_M)


@triton.jit
def normalised(value, mean, scale, shift, dtype: tl.constexpr):
    """shift: -mean * scale. Its rounding error is too small for 16-bit results."""
    if dtype == tl.float32:
        normed = (value - mean) * scale
    else:
        normed = tl.fma(value, scale, shift)
    return normed


@triton.jit
def add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def backward_streamed(
    dx, dweight, dbias, partial, dy, x, weight, statistics,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner, flags,
    LANES: tl.constexpr, TILES: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
    W: tl.constexpr = weight.dtype.element_ty
    VEC: tl.constexpr = lane_columns(DTYPE)
    PER: tl.constexpr = TILES // PIECES
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    left = columns_left(n, True, LANES, VEC)
    ring = make_ring(program, LANES, PER, SLOTS)
    fill_ring(
        ring, x, dy, program, rows, programs, n, inner_rows, x_outer, x_inner, dy_outer, dy_inner,
        LANES, VEC, PER, PIECES, SLOTS,
    )  # fmt: skip
    scales = statistics + rows.to(tl.int64)
    next_mean = tl.load(statistics + program)
    next_scale = tl.load(scales + program)
    weight_at = first_lane(weight.to(tl.int64), LANES)
    weight_left = columns_left(n, (flags & HAS_WEIGHT) != 0, LANES, VEC)
    weights = ()
    for t in tl.static_range(TILES):
        weights = weights + (load_lane(weight_at, weight_left, t, W, LANES, VEC),)
    dweights = zero_sums(LANES, TILES * VEC)
    dbiases = zero_sums(LANES, TILES * VEC)

    for row in tl.range(program, rows, programs):
        xs_ahead, dys_ahead, columns_ahead = pieces_ahead(
            x, dy, row, rows, programs, n, inner_rows, x_outer, x_inner, dy_outer, dy_inner, PIECES, SLOTS
        )
        dx_start = row_start(dx, row, inner_rows, dx_outer, dx_inner)
        mean = next_mean
        scale = next_scale
        shift = -mean * scale
        following = row + programs
        next_mean = tl.load(statistics + following, mask=following < rows, other=0.0)
        next_scale = tl.load(scales + following, mask=following < rows, other=0.0)
        dots = tl.zeros([LANES], tl.float32)
        totals = tl.zeros([LANES], tl.float32)
        new_dweights = ()
        new_dbiases = ()
        for t in tl.static_range(TILES):
            wait_for_tiles(row, SLOTS * PER - 1 - t)
            values, grads = read_pair(ring, t, DTYPE, LANES, PER)
            ws = unpack(weights[t], W)
            for i in tl.static_range(VEC):
                normed = normalised(values[i], mean, scale, shift, DTYPE)
                new_dweights = new_dweights + (tl.fma(grads[i], normed, dweights[t * VEC + i]),)
                new_dbiases = new_dbiases + (dbiases[t * VEC + i] + grads[i],)
                grad = grads[i] * ws[i]
                dots = tl.fma(grad, normed, dots)
                totals += grad
        dweights = new_dweights
        dbiases = new_dbiases
        dot, total = tl.reduce((dots, totals), 0, add_pairs)
        slope = -scale * (dot / n)
        offset = -scale * (total / n)
        if PREFETCH:
            pair = read_pair(ring, 0, DTYPE, LANES, PER)
        for t in tl.static_range(TILES):
            if PREFETCH:
                values, grads = pair
                if t + 1 < TILES:
                    pair = read_pair(ring, t + 1, DTYPE, LANES, PER)
            else:
                values, grads = read_pair(ring, t, DTYPE, LANES, PER)
                refill(ring, xs_ahead, dys_ahead, columns_ahead, t, LANES, VEC, PER, PIECES, SLOTS)
            ws = unpack(weights[t], W)
            out = ()
            for i in tl.static_range(VEC):
                normed = normalised(values[i], mean, scale, shift, DTYPE)
                out = out + (tl.fma(grads[i] * scale, ws[i], tl.fma(normed, slope, offset)),)
            store_lane(first_lane(dx_start, LANES), left, lane_words(out, DTYPE), t, LANES, VEC)
            if PREFETCH:
                refill(ring, xs_ahead, dys_ahead, columns_ahead, t, LANES, VEC, PER, PIECES, SLOTS)
        ring = rotate_ring(ring, PIECES, SLOTS)

    dweight_wanted = (flags & NEEDS_DWEIGHT) != 0
    dbias_wanted = (flags & NEEDS_DBIAS) != 0
    if flags & FINAL:
        store_gradient(dweight, dweights, n, dweight_wanted, LANES, TILES, VEC)
        store_gradient(dbias, dbiases, n, dbias_wanted, LANES, TILES, VEC)
    else:
        shares = partial + program.to(tl.int64) * n
        store_sums(shares, dweights, n, dweight_wanted, LANES, TILES, VEC)
        shares += programs.to(tl.int64) * n
        store_sums(shares, dbiases, n, dbias_wanted, LANES, TILES, VEC)


@triton.jit
def layer_norm_bwd_kernel(
    dx, dweight, dbias, partial, dy, x, weight, statistics,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, PREFETCH: tl.constexpr,
    PIECES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # A tile has BLOCK_N 16-bit columns, or half as many 32-bit columns.
    LANES: tl.constexpr = BLOCK_N // 8
    LANE_TILES: tl.constexpr = TILES * x.dtype.element_ty.primitive_bitwidth // 16
    FIT: tl.constexpr = slots_that_fit(SLOTS, PIECES, 2 * LANE_TILES * LANES * LANE_BYTES)
    if FIT:
        backward_streamed(
            dx, dweight, dbias, partial, dy, x, weight, statistics,
            rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner, flags,
            LANES, LANE_TILES, PIECES, FIT, PREFETCH,
        )  # fmt: skip
    else:
        backward_held(
            dx, dweight, dbias, partial, dy, x, weight, statistics,
            rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner, flags,
            BLOCK_M, BLOCK_N, TILES, PREFETCH,
        )  # fmt: skip


@triton.jit
def backward_held(
    dx, dweight, dbias, partial, dy, x, weight, statistics,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # partial: (2, programs, n): shares of dweight, then of dbias
    dweight_row = partial + program.to(tl.int64) * n
    dbias_row = dweight_row + programs.to(tl.int64) * n
    dweight_wanted = (flags & NEEDS_DWEIGHT) != 0
    dbias_wanted = (flags & NEEDS_DBIAS) != 0
    dweights = zero_tiles(BLOCK_M, BLOCK_N, TILES)
    dbiases = zero_tiles(BLOCK_M, BLOCK_N, TILES)
    if PREFETCH:
        row = block_rows(program, BLOCK_M)
        next_x = load_tiles(x + row_offset(row, inner_rows, x_outer, x_inner), row < rows, n, BLOCK_N, TILES)
        next_dy = load_tiles(dy + row_offset(row, inner_rows, dy_outer, dy_inner), row < rows, n, BLOCK_N, TILES)
        next_mean = load_per_row(statistics, row, row < rows, BLOCK_M)
        next_scale = load_per_row(statistics + rows.to(tl.int64), row, row < rows, BLOCK_M)

    for block in tl.range(program, tl.cdiv(rows, BLOCK_M), programs):
        row = block_rows(block, BLOCK_M)
        row_mask = row < rows
        x_row = x + row_offset(row, inner_rows, x_outer, x_inner)
        dy_row = dy + row_offset(row, inner_rows, dy_outer, dy_inner)
        dx_row = dx + row_offset(row, inner_rows, dx_outer, dx_inner)
        if PREFETCH:
            mean = next_mean
            scale = next_scale
        else:
            mean = load_per_row(statistics, row, row_mask, BLOCK_M)
            scale = load_per_row(statistics + rows.to(tl.int64), row, row_mask, BLOCK_M)
        # With one column the gradient is zero. Computed, it would be a rounding error times 1 / sqrt(eps).
        scale_out = tl.where(n > 1, scale, 0.0)
        dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

        if TILES > 0:
            if PREFETCH:
                xs = next_x
                dys = next_dy
                ahead = block_rows(block + programs, BLOCK_M)
                next_x = load_tiles(
                    x + row_offset(ahead, inner_rows, x_outer, x_inner), ahead < rows, n, BLOCK_N, TILES
                )
                next_dy = load_tiles(
                    dy + row_offset(ahead, inner_rows, dy_outer, dy_inner), ahead < rows, n, BLOCK_N, TILES
                )
                next_mean = load_per_row(statistics, ahead, ahead < rows, BLOCK_M)
                next_scale = load_per_row(statistics + rows.to(tl.int64), ahead, ahead < rows, BLOCK_M)
            else:
                xs = load_tiles(x_row, row_mask, n, BLOCK_N, TILES)
                dys = load_tiles(dy_row, row_mask, n, BLOCK_N, TILES)
            new_dweights = ()
            new_dbiases = ()
            for t in tl.static_range(TILES):
                cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :]
                normed = (xs[t].to(tl.float32) - mean) * scale
                grad = dys[t].to(tl.float32)
                new_dweights = new_dweights + (dweights[t] + grad * normed,)
                new_dbiases = new_dbiases + (dbiases[t] + grad,)
                dots += grad * w * normed
                totals += grad * w
            dweights = new_dweights
            dbiases = new_dbiases
            dot = row_mean(dots, n)
            total = row_mean(totals, n)
            for t in tl.static_range(TILES):
                cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :]
                normed = (xs[t].to(tl.float32) - mean) * scale
                grad = dys[t].to(tl.float32) * w
                out = (grad - total - normed * dot) * scale_out
                tl.store(dx_row + cols[None, :], out, mask=mask)
        else:
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :]
                value = tl.load(x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                grad = tl.load(dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32) * w
                dots += grad * (value - mean) * scale
                totals += grad
            dot = row_mean(dots, n)
            total = row_mean(totals, n)
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :]
                value = tl.load(x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                grad = tl.load(dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                normed = (value - mean) * scale
                out = (grad * w - total - normed * dot) * scale_out
                tl.store(dx_row + cols[None, :], out, mask=mask)
                first = block == program
                before = tl.load(dweight_row + cols, mask=(cols < n) & dweight_wanted & (first == 0), other=0.0)
                share = before + tl.sum(grad * normed, axis=0)
                store_share(dweight, dweight_row, cols, share, (cols < n) & dweight_wanted, flags & FINAL)
                before = tl.load(dbias_row + cols, mask=(cols < n) & dbias_wanted & (first == 0), other=0.0)
                share = before + tl.sum(grad, axis=0)
                store_share(dbias, dbias_row, cols, share, (cols < n) & dbias_wanted, flags & FINAL)
            # All rows of this program update the same partial rows: no thread may start the next update early.
            tl.debug_barrier()

    if TILES > 0:
        for t in tl.static_range(TILES):
            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
            share = tl.sum(dweights[t], axis=0)
            store_share(dweight, dweight_row, cols, share, (cols < n) & dweight_wanted, flags & FINAL)
            share = tl.sum(dbiases[t], axis=0)
            store_share(dbias, dbias_row, cols, share, (cols < n) & dbias_wanted, flags & FINAL)


forward_config = partial(rows_config, early=0, ahead=0)
backward_config = partial(rows_config, prefetch=0, pieces=0, slots=0)
# With few rows per program, filling a ring costs more than it saves, except in fp32.
few_rows_config = partial(backward_config, only=HALVES)


KERNELS = [
    Kernel(
        function=layer_norm_fwd_kernel,
        args={
            "y": "*X", "statistics": "*fp32", "x": "*X", "weight": "*W", "bias": "*W",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            **strides("y", "x"),
            "eps": "fp32", "flags": "i32",
        },
        aligned=["y", "x", "weight", "bias", "n", *strides("y", "x")],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES},
        # The fastest shapes on an H200, see rms_norm.py. For up to 11264 columns, four warps have no registers left to
        # prefetch later rows.
        configs=fewer_when_mixed([
            forward_config(64, 64, 64, 1, 4, 8),
            forward_config(128, 32, 128, 1, 4, 8),
            forward_config(256, 16, 256, 1, 4, 8),
            forward_config(512, 1, 512, 1, 2, early=1, max_rows=1024),
            forward_config(512, 1, 512, 1, 1, ahead=1, only=FLOATS),
            forward_config(512, 8, 512, 1, 4, 6),
            forward_config(1024, 1, 1024, 1, 2, 16, ahead=1),
            forward_config(2048, 1, 2048, 1, 4, early=1, max_rows=128),
            forward_config(2048, 1, 1024, 2, 4, ahead=1, only=FLOATS),
            forward_config(2048, 1, 2048, 1, 4, ahead=1),
            forward_config(4096, 1, 4096, 1, 8, early=1, max_rows=256),
            forward_config(2560, 1, 512, 5, 4, 12),
            forward_config(3072, 1, 1024, 3, 4, 10, ahead=1),
            forward_config(4096, 1, 4096, 1, 4, 8, ahead=1, **PLAIN_HALVES),
            forward_config(4096, 1, 4096, 1, 8, ahead=1),
            forward_config(8192, 1, 8192, 1, 16, early=1, max_rows=256),
            forward_config(5120, 1, 1024, 5, 4, ahead=1, only=HALVES),
            forward_config(6144, 1, 2048, 3, 4, ahead=1),
            forward_config(8192, 1, 4096, 2, 4, 4, ahead=1),
            forward_config(12288, 1, 4096, 3, 16, early=1, max_rows=256),
            forward_config(11264, 1, 4096, 3, 4, 4, **PLAIN_HALVES),
            forward_config(12288, 1, 4096, 3, 8, ahead=1),
            forward_config(16384, 1, 4096, 4, 16, early=1, max_rows=128),
            forward_config(14336, 1, 2048, 7, 8, 2, ahead=1, **PLAIN_HALVES),
            forward_config(16384, 1, 4096, 4, 16, 2, ahead=1),
            forward_config(32768, 1, 8192, 4, 16, 1, ahead=1, **PLAIN_HALVES),
            forward_config(32768, 1, 8192, 4, 32, 1, ahead=1),
            forward_config(None, 1, 8192, 0, 16),
            forward_config(64, 32, 64, 1, 4, aligned=False),
            forward_config(512, 4, 512, 1, 4, aligned=False),
            forward_config(None, 1, 2048, 0, 8, aligned=False),
        ]),
    ),
    Kernel(
        function=layer_norm_bwd_kernel,
        args={
            "dx": "*X", "dweight": "*W", "dbias": "*W", "partial": "*fp32", "dy": "*X", "x": "*X", "weight": "*W",
            "statistics": "*fp32", "rows": "i32", "n": "i32", "inner_rows": "i32",
            **strides("dx", "dy", "x"),
            "flags": "i32",
        },
        aligned=[
            "dx", "dweight", "dbias", "partial", "dy", "x", "weight", "n",
            *strides("dx", "dy", "x"),
        ],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES},
        # The fastest shapes on an H200. Eight warps leave a thread enough registers to read the next tile early
        # (prefetch); in fp32, whose tiles are half as large, this does not pay off. fp32 rows of 16384 columns fit no
        # ring.
        configs=fewer_when_mixed([
            backward_config(64, 32, 64, 1, 4, 4, prefetch=1),
            backward_config(128, 32, 128, 1, 4, 3),
            backward_config(256, 16, 256, 1, 4, 3),
            backward_config(512, 8, 512, 1, 4, 3),
            few_rows_config(1024, 2, 1024, 1, 4, 4, max_rows=4096, prefetch=1),
            backward_config(1024, 1, 1024, 1, 4, 6, pieces=1, slots=2),
            few_rows_config(2048, 1, 1024, 2, 4, 5, max_rows=1024),
            backward_config(2048, 1, 1024, 2, 4, 4, pieces=1, slots=2),
            few_rows_config(3072, 1, 1024, 3, 4, 4, max_rows=512),
            backward_config(3072, 1, 1024, 3, 4, 3, pieces=1, slots=2),
            few_rows_config(4096, 1, 2048, 2, 4, 3, max_rows=512),
            backward_config(4096, 1, 1024, 4, 4, 2, pieces=1, slots=2),
            few_rows_config(5120, 1, 1024, 5, 4, 2, max_rows=1024, prefetch=1),
            backward_config(5120, 1, 1024, 5, 4, 2, pieces=1, slots=2),
            backward_config(6144, 1, 2048, 3, 8, 2, pieces=3, slots=5),
            few_rows_config(8192, 1, 4096, 2, 16, 1, max_rows=1024, prefetch=1),
            backward_config(8192, 1, 4096, 2, 16, 1, pieces=2, slots=4),
            few_rows_config(12288, 1, 4096, 3, 16, 1, max_rows=512),
            backward_config(12288, 1, 2048, 6, 8, 1, prefetch=1, pieces=3, slots=5, **PLAIN_HALVES),
            backward_config(12288, 1, 4096, 3, 16, 1, pieces=3, slots=5),
            few_rows_config(16384, 1, 2048, 8, 8, 1, max_rows=512),
            backward_config(16384, 1, 4096, 4, 16, 1, prefetch=1, pieces=2, slots=3, only=HALVES),
            backward_config(14336, 1, 2048, 7, 8, 1),
            backward_config(16384, 1, 1024, 16, 8, 1),
            backward_config(None, 1, 16384, 0, 32, 1),
            backward_config(64, 16, 64, 1, 4, 4, aligned=False),
            backward_config(512, 4, 512, 1, 4, 4, aligned=False),
            backward_config(None, 1, 2048, 0, 8, 2, aligned=False),
        ]),
    ),
]  # fmt: skip
