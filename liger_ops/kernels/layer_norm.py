"""LayerNorm: y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias.

Forward and backward are shaped like those of rms_norm, whose file explains tiles, loops and persistent programs.
The variance is summed over centred values that stay in registers: no cancellation, and no second read.
Rows too wide for one rounding of the mean correct it by the mean of the centred values (`drift`).
"""

import triton
import triton.language as tl

from .rows import (
    block_rows,
    load_parameter,
    load_parameter_tiles,
    load_per_row,
    load_tiles,
    row_mean,
    row_offset,
    store_per_row,
    zero_tiles,
)
from .table import ACTIVATION_WEIGHT_DTYPES, Config, Kernel, fewer_when_mixed

HAS_WEIGHT = tl.constexpr(1)
HAS_BIAS = tl.constexpr(2)
SAVE_STATISTICS = tl.constexpr(4)
NEEDS_DWEIGHT = tl.constexpr(8)
NEEDS_DBIAS = tl.constexpr(16)


@triton.jit
def layer_norm_fwd_kernel(
    y, statistics, x, weight, bias,
    rows, n, inner_rows, y_outer, y_inner, x_outer, x_inner, eps, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
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

    # statistics: (2, rows), means then reciprocal deviations
    save = row_mask & ((flags & SAVE_STATISTICS) != 0)
    store_per_row(statistics, row, mean + drift, save, BLOCK_M)
    store_per_row(statistics + rows.to(tl.int64), row, scale, save, BLOCK_M)


@triton.jit
def layer_norm_bwd_kernel(
    dx, partial, dy, x, weight, statistics,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, x_outer, x_inner, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # partial: (2, programs, n), shares of dweight then of dbias
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
        # One column has no variance, so its gradient is zero; a fused multiply-add would miss that by a rounding / sqrt(eps).
        scale_out = tl.where(n > 1, scale, 0.0)
        dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

        if TILES > 0:
            if PREFETCH:
                xs = next_x
                dys = next_dy
                ahead = block_rows(block + programs, BLOCK_M)
                next_x = load_tiles(x + row_offset(ahead, inner_rows, x_outer, x_inner), ahead < rows, n, BLOCK_N, TILES)
                next_dy = load_tiles(dy + row_offset(ahead, inner_rows, dy_outer, dy_inner), ahead < rows, n, BLOCK_N, TILES)
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
                tl.store(dweight_row + cols, before + tl.sum(grad * normed, axis=0), mask=(cols < n) & dweight_wanted)
                before = tl.load(dbias_row + cols, mask=(cols < n) & dbias_wanted & (first == 0), other=0.0)
                tl.store(dbias_row + cols, before + tl.sum(grad, axis=0), mask=(cols < n) & dbias_wanted)
            # Rows of this program meet in its partial rows: no lane may run ahead of another's update.
            tl.debug_barrier()

    if TILES > 0:
        for t in tl.static_range(TILES):
            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(dweight_row + cols, tl.sum(dweights[t], axis=0), mask=(cols < n) & dweight_wanted)
            tl.store(dbias_row + cols, tl.sum(dbiases[t], axis=0), mask=(cols < n) & dbias_wanted)


def forward_config(max_n, block_m, block_n, tiles, num_warps, programs_per_sm=0, early=0, aligned=True, max_rows=None):
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles, EARLY=early)
    return Config(max_n, aligned, num_warps, programs_per_sm, constexprs, max_rows=max_rows)


def backward_config(max_n, block_m, block_n, tiles, num_warps, programs_per_sm, prefetch=0, aligned=True):
    constexprs = dict(BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles, PREFETCH=prefetch)
    return Config(max_n, aligned, num_warps, programs_per_sm, constexprs)


KERNELS = [
    Kernel(
        function=layer_norm_fwd_kernel,
        args={
            "y": "*X", "statistics": "*fp32", "x": "*X", "weight": "*W", "bias": "*W",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            "y_outer": "i64", "y_inner": "i64", "x_outer": "i64", "x_inner": "i64",
            "eps": "fp32", "flags": "i32",
        },
        aligned=["y", "x", "weight", "bias", "n", "y_outer", "y_inner", "x_outer", "x_inner"],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES},
        # Best of the sweep that chose rms_norm's. Two sums a column leave backward one program on a multiprocessor from
        # 8192 columns on, and its loads uncovered: 60-75 % of the copy bandwidth there, 85 % below. Few rows: see rms_norm;
        # us of 1 and 128 rows with early parameters: 2048 columns 5.2 and 5.5 (5.9 and 5.9), 16384 6.6 and 8.5 (8.1 and 9.3).
        configs=fewer_when_mixed([
            forward_config(64, 64, 64, 1, 4, 8),
            forward_config(128, 32, 128, 1, 4, 8),
            forward_config(256, 16, 256, 1, 4, 8),
            forward_config(512, 1, 512, 1, 2, early=1, max_rows=1024),
            forward_config(512, 8, 512, 1, 4, 6),
            forward_config(1024, 2, 1024, 1, 4, 16),
            forward_config(2048, 1, 2048, 1, 4, early=1, max_rows=128),
            forward_config(2048, 1, 2048, 1, 4, 12),
            forward_config(4096, 1, 4096, 1, 8, early=1, max_rows=256),
            forward_config(2560, 1, 512, 5, 4, 12),
            forward_config(3072, 1, 1024, 3, 4, 10),
            forward_config(4096, 1, 4096, 1, 4, 8),
            forward_config(8192, 1, 8192, 1, 16, early=1, max_rows=256),
            forward_config(5120, 1, 1024, 5, 4),
            forward_config(6144, 1, 2048, 3, 4),
            forward_config(8192, 1, 4096, 2, 4, 4),
            forward_config(12288, 1, 4096, 3, 16, early=1, max_rows=256),
            forward_config(12288, 1, 4096, 3, 4, 4),
            forward_config(16384, 1, 4096, 4, 16, early=1, max_rows=128),
            forward_config(16384, 1, 4096, 4, 8, 2),
            forward_config(32768, 1, 8192, 4, 32),
            forward_config(None, 1, 8192, 0, 16),
            forward_config(64, 32, 64, 1, 4, aligned=False),
            forward_config(512, 4, 512, 1, 4, aligned=False),
            forward_config(None, 1, 2048, 0, 8, aligned=False),
        ]),
    ),
    Kernel(
        function=layer_norm_bwd_kernel,
        args={
            "dx": "*X", "partial": "*fp32", "dy": "*X", "x": "*X", "weight": "*W", "statistics": "*fp32",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            "dx_outer": "i64", "dx_inner": "i64", "dy_outer": "i64", "dy_inner": "i64", "x_outer": "i64", "x_inner": "i64",
            "flags": "i32",
        },
        aligned=[
            "dx", "partial", "dy", "x", "weight", "n",
            "dx_outer", "dx_inner", "dy_outer", "dy_inner", "x_outer", "x_inner",
        ],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES},
        configs=fewer_when_mixed([
            backward_config(64, 32, 64, 1, 4, 4, prefetch=1),
            backward_config(128, 32, 128, 1, 4, 3),
            backward_config(256, 16, 256, 1, 4, 3),
            backward_config(512, 8, 512, 1, 4, 3),
            backward_config(1024, 2, 1024, 1, 4, 4, prefetch=1),
            backward_config(2048, 1, 1024, 2, 4, 5),
            backward_config(2560, 1, 512, 5, 4, 4),
            backward_config(3072, 1, 1024, 3, 4, 4),
            backward_config(4096, 1, 2048, 2, 4, 3),
            backward_config(5120, 1, 1024, 5, 4, 2, prefetch=1),
            backward_config(6144, 1, 2048, 3, 8, 2),
            backward_config(8192, 1, 4096, 2, 16, 1, prefetch=1),
            backward_config(12288, 1, 4096, 3, 16, 1),
            backward_config(14336, 1, 2048, 7, 8, 1),
            backward_config(16384, 1, 2048, 8, 8, 1),
            backward_config(None, 1, 16384, 0, 32, 1),
            backward_config(64, 16, 64, 1, 4, 4, aligned=False),
            backward_config(512, 4, 512, 1, 4, 4, aligned=False),
            backward_config(None, 1, 2048, 0, 8, 2, aligned=False),
        ]),
    ),
]  # fmt: skip
