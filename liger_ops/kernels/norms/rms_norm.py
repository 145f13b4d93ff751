"""RMSNorm, alone or after a residual addition.

    s = x + residual                (rounded to its dtype, because s is returned)
    y = s * rsqrt(mean(s^2) + eps) * (weight + offset)

Forward: one program processes BLOCK_M whole rows, in TILES tiles of BLOCK_N columns held in registers.
Tile counts that are not powers of two fit hidden sizes such as 2560, 5120 or 11008 without padding.
TILES = 0 is a loop for unaligned rows and for rows that do not fit into registers. It reads a row twice.
With AHEAD, a program prefetches rows of later programs into the L2 cache. With EARLY, it loads the weight before its
rows.

Backward: programs are persistent. A program sums the weight's gradient over all its rows in registers, and writes it
once, as one fp32 row of partial sums; column_sum adds these up in a fixed order. If there is only one program, it
writes the gradient itself (FINAL). Rows stream through shared memory (SLOTS > 0, see streamed.py), or are loaded when
they are needed.
"""

from functools import partial

import triton
import triton.language as tl

from ..kept import lane_words, unpack
from ..rows import (
    block_rows,
    load_parameter,
    load_parameter_tiles,
    load_per_row,
    load_tiles,
    prefetch,
    programs_ahead,
    round_if,
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
ROUND_FIRST = tl.constexpr(2)  # casting mode "llama": rows are rounded before they are multiplied by the weight
SAVE_RSTD = tl.constexpr(8)
NEEDS_DWEIGHT = tl.constexpr(16)
FINAL = tl.constexpr(32)


@triton.jit
def rms_norm_fwd_kernel(
    y, s, rstd, x, residual, weight,
    rows, n, inner_rows, y_outer, y_inner, x_outer, x_inner, residual_outer, residual_inner, eps, offset, flags,
    RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    row = block_rows(tl.program_id(0), BLOCK_M)
    row_mask = row < rows
    x_row = x + row_offset(row, inner_rows, x_outer, x_inner)
    y_offset = row_offset(row, inner_rows, y_outer, y_inner)
    dtype: tl.constexpr = x.dtype.element_ty
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if RESIDUAL:
        residual_row = residual + row_offset(row, inner_rows, residual_outer, residual_inner)

    if TILES > 0:
        # In fp32, registers hold the weight and one row, but not the weight and two rows.
        HELD: tl.constexpr = EARLY and not (RESIDUAL and dtype.primitive_bitwidth == 32)
        if HELD:
            weights = load_parameter_tiles(weight, n, flags & HAS_WEIGHT, 1.0, BLOCK_N, TILES)
        tiles = load_tiles(x_row, row_mask, n, BLOCK_N, TILES, HELD)
        if RESIDUAL:
            tiles = add_tiles(tiles, load_tiles(residual_row, row_mask, n, BLOCK_N, TILES), TILES)
        if AHEAD:
            later = row + programs_ahead(TILES * BLOCK_N * dtype.primitive_bitwidth // 8 * (1 + RESIDUAL))
            columns = tl.where(later < rows, n, 0)
            prefetch(x + row_offset(later, inner_rows, x_outer, x_inner), 0, columns)
            if RESIDUAL:
                prefetch(residual + row_offset(later, inner_rows, residual_outer, residual_inner), 0, columns)
        for t in tl.static_range(TILES):
            value = tiles[t].to(tl.float32)
            squares += value * value
        scale = tl.rsqrt(row_mean(squares, n) + eps)
        for t in tl.static_range(TILES):
            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = row_mask & (cols < n)[None, :]
            if HELD:
                w = weights[t].to(tl.float32)[None, :] + offset
            else:
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
            if RESIDUAL:
                tl.store(s + y_offset + cols[None, :], tiles[t], mask=mask)
            normed = round_if(tiles[t].to(tl.float32) * scale, flags & ROUND_FIRST, dtype)
            tl.store(y + y_offset + cols[None, :], normed * w, mask=mask)
    else:
        for start in range(0, n, BLOCK_N):
            tiles = load_tiles(x_row + start, row_mask, n - start, BLOCK_N, 1)
            if RESIDUAL:
                tiles = add_tiles(tiles, load_tiles(residual_row + start, row_mask, n - start, BLOCK_N, 1), 1)
            value = tiles[0].to(tl.float32)
            squares += value * value
        scale = tl.rsqrt(row_mean(squares, n) + eps)
        for start in range(0, n, BLOCK_N):
            tiles = load_tiles(x_row + start, row_mask, n - start, BLOCK_N, 1)
            cols = start + tl.arange(0, BLOCK_N)
            mask = row_mask & (cols < n)[None, :]
            if RESIDUAL:
                tiles = add_tiles(tiles, load_tiles(residual_row + start, row_mask, n - start, BLOCK_N, 1), 1)
                tl.store(s + y_offset + cols[None, :], tiles[0], mask=mask)
            w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
            normed = round_if(tiles[0].to(tl.float32) * scale, flags & ROUND_FIRST, dtype)
            tl.store(y + y_offset + cols[None, :], normed * w, mask=mask)

    store_per_row(rstd, row, scale, row_mask & ((flags & SAVE_RSTD) != 0), BLOCK_M)


@triton.jit
def add_tiles(a, b, TILES: tl.constexpr):
    """a + b, rounded to the tensors' own dtype."""
    out = ()
    for t in tl.static_range(TILES):
        out = out + ((a[t].to(tl.float32) + b[t].to(tl.float32)).to(a[t].dtype),)
    return out


@triton.jit
def backward_streamed(
    dx, dweight, partial, dy, ds, x, weight, rstd,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, ds_outer, ds_inner, x_outer, x_inner,
    offset, flags,
    RESIDUAL: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
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
    next_scale = tl.load(rstd + program)
    weight_at = first_lane(weight.to(tl.int64), LANES)
    weight_left = columns_left(n, (flags & HAS_WEIGHT) != 0, LANES, VEC)
    weights = ()
    for t in tl.static_range(TILES):
        ws = unpack(load_lane(weight_at, weight_left, t, W, LANES, VEC), W)
        for i in tl.static_range(VEC):
            weights = weights + (ws[i] + offset,)
    sums = zero_sums(LANES, TILES * VEC)

    for row in tl.range(program, rows, programs):
        xs_ahead, dys_ahead, columns_ahead = pieces_ahead(
            x, dy, row, rows, programs, n, inner_rows, x_outer, x_inner, dy_outer, dy_inner, PIECES, SLOTS
        )
        dx_start = row_start(dx, row, inner_rows, dx_outer, dx_inner)
        scale = next_scale
        next_scale = tl.load(rstd + row + programs, mask=row + programs < rows, other=0.0)
        if RESIDUAL:
            ds_at = first_lane(row_start(ds, row, inner_rows, ds_outer, ds_inner), LANES)
            dss = ()
            for t in tl.static_range(TILES):
                dss = dss + (load_lane(ds_at, left, t, DTYPE, LANES, VEC),)
        dots = tl.zeros([LANES], tl.float32)
        new_sums = ()
        for t in tl.static_range(TILES):
            wait_for_tiles(row, SLOTS * PER - 1 - t)
            values, grads = read_pair(ring, t, DTYPE, LANES, PER)
            normed = ()
            for i in tl.static_range(VEC):
                normed = normed + (values[i] * scale,)
            rounded = unpack(lane_words(normed, DTYPE), DTYPE)
            for i in tl.static_range(VEC):
                share = grads[i] * tl.where((flags & ROUND_FIRST) != 0, rounded[i], normed[i])
                new_sums = new_sums + (sums[t * VEC + i] + share,)
                dots += grads[i] * weights[t * VEC + i] * normed[i]
        sums = new_sums
        slope = -scale * scale * (tl.sum(dots, axis=0) / n)
        for t in tl.static_range(TILES):
            values, grads = read_pair(ring, t, DTYPE, LANES, PER)
            refill(ring, xs_ahead, dys_ahead, columns_ahead, t, LANES, VEC, PER, PIECES, SLOTS)
            if RESIDUAL:
                residuals = unpack(dss[t], DTYPE)
            out = ()
            for i in tl.static_range(VEC):
                value = grads[i] * weights[t * VEC + i] * scale + values[i] * slope
                if RESIDUAL:
                    value += residuals[i]
                out = out + (value,)
            store_lane(first_lane(dx_start, LANES), left, lane_words(out, DTYPE), t, LANES, VEC)
        ring = rotate_ring(ring, PIECES, SLOTS)

    wanted = (flags & NEEDS_DWEIGHT) != 0
    if flags & FINAL:
        store_gradient(dweight, sums, n, wanted, LANES, TILES, VEC)
    else:
        store_sums(partial + program.to(tl.int64) * n, sums, n, wanted, LANES, TILES, VEC)


@triton.jit
def rms_norm_bwd_kernel(
    dx, dweight, partial, dy, ds, x, weight, rstd,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, ds_outer, ds_inner, x_outer, x_inner,
    offset, flags,
    RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, PREFETCH: tl.constexpr,
    EARLY: tl.constexpr, PIECES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # A tile has BLOCK_N 16-bit columns, or half as many 32-bit columns.
    LANES: tl.constexpr = BLOCK_N // 8
    LANE_TILES: tl.constexpr = TILES * x.dtype.element_ty.primitive_bitwidth // 16
    FIT: tl.constexpr = slots_that_fit(SLOTS, PIECES, 2 * LANE_TILES * LANES * LANE_BYTES)
    if FIT:
        backward_streamed(
            dx, dweight, partial, dy, ds, x, weight, rstd,
            rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, ds_outer, ds_inner, x_outer, x_inner,
            offset, flags, RESIDUAL, LANES, LANE_TILES, PIECES, FIT,
        )  # fmt: skip
    else:
        backward_held(
            dx, dweight, partial, dy, ds, x, weight, rstd,
            rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, ds_outer, ds_inner, x_outer, x_inner,
            offset, flags, RESIDUAL, BLOCK_M, BLOCK_N, TILES, PREFETCH, EARLY,
        )  # fmt: skip


@triton.jit
def backward_held(
    dx, dweight, partial, dy, ds, x, weight, rstd,
    rows, n, inner_rows, dx_outer, dx_inner, dy_outer, dy_inner, ds_outer, ds_inner, x_outer, x_inner,
    offset, flags,
    RESIDUAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    dtype: tl.constexpr = x.dtype.element_ty
    partial_row = partial + program.to(tl.int64) * n
    sums = zero_tiles(BLOCK_M, BLOCK_N, TILES)
    # Registers hold either the next rows or ds, and in fp32 not ds. ds must be loaded before the reduction, because no
    # load is moved across its barrier.
    with_ds: tl.constexpr = RESIDUAL and EARLY and dtype.primitive_bitwidth < 32
    next_rows: tl.constexpr = PREFETCH and not with_ds
    if next_rows:
        row = block_rows(program, BLOCK_M)
        next_x = load_tiles(x + row_offset(row, inner_rows, x_outer, x_inner), row < rows, n, BLOCK_N, TILES)
        next_dy = load_tiles(dy + row_offset(row, inner_rows, dy_outer, dy_inner), row < rows, n, BLOCK_N, TILES)

    for block in tl.range(program, tl.cdiv(rows, BLOCK_M), programs):
        row = block_rows(block, BLOCK_M)
        row_mask = row < rows
        x_row = x + row_offset(row, inner_rows, x_outer, x_inner)
        dy_row = dy + row_offset(row, inner_rows, dy_outer, dy_inner)
        dx_row = dx + row_offset(row, inner_rows, dx_outer, dx_inner)
        ds_row = ds + row_offset(row, inner_rows, ds_outer, ds_inner)
        scale = load_per_row(rstd, row, row_mask, BLOCK_M)
        dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

        if TILES > 0:
            if next_rows:
                # The next rows load while these are reduced. In their own dtype they need half the registers.
                xs = next_x
                dys = next_dy
                ahead = block_rows(block + programs, BLOCK_M)
                next_x = load_tiles(
                    x + row_offset(ahead, inner_rows, x_outer, x_inner), ahead < rows, n, BLOCK_N, TILES
                )
                next_dy = load_tiles(
                    dy + row_offset(ahead, inner_rows, dy_outer, dy_inner), ahead < rows, n, BLOCK_N, TILES
                )
            else:
                xs = load_tiles(x_row, row_mask, n, BLOCK_N, TILES)
                dys = load_tiles(dy_row, row_mask, n, BLOCK_N, TILES)
            if with_ds:
                dss = load_tiles(ds_row, row_mask, n, BLOCK_N, TILES)
            new_sums = ()
            for t in tl.static_range(TILES):
                cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                normed = xs[t].to(tl.float32) * scale
                grad = dys[t].to(tl.float32)
                new_sums = new_sums + (sums[t] + grad * round_if(normed, flags & ROUND_FIRST, dtype),)
                dots += grad * w * normed
            sums = new_sums
            mean = row_mean(dots, n)
            for t in tl.static_range(TILES):
                cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                out = (dys[t].to(tl.float32) * w - xs[t].to(tl.float32) * scale * mean) * scale
                if with_ds:
                    out += dss[t].to(tl.float32)
                elif RESIDUAL:
                    out += tl.load(ds_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_row + cols[None, :], out, mask=mask)
        else:
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                normed = tl.load(x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32) * scale
                grad = tl.load(dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                dots += grad * w * normed
            mean = row_mean(dots, n)
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                normed = tl.load(x_row + cols[None, :], mask=mask, other=0.0).to(tl.float32) * scale
                grad = tl.load(dy_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                out = (grad * w - normed * mean) * scale
                if RESIDUAL:
                    out += tl.load(ds_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                tl.store(dx_row + cols[None, :], out, mask=mask)
                share = tl.sum(grad * round_if(normed, flags & ROUND_FIRST, dtype), axis=0)
                wanted = (cols < n) & ((flags & NEEDS_DWEIGHT) != 0)
                before = tl.load(partial_row + cols, mask=wanted & (block != program), other=0.0)
                store_share(dweight, partial_row, cols, before + share, wanted, flags & FINAL)
            # All rows of this program update the same partial row: no thread may start the next update early.
            tl.debug_barrier()

    if TILES > 0:
        for t in tl.static_range(TILES):
            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
            wanted = (cols < n) & ((flags & NEEDS_DWEIGHT) != 0)
            store_share(dweight, partial_row, cols, tl.sum(sums[t], axis=0), wanted, flags & FINAL)


forward_config = partial(rows_config, early=0, ahead=0)
backward_config = partial(rows_config, prefetch=0, early=1, pieces=0, slots=0)
# With few rows per program, filling a ring costs more than it saves, except in fp32.
few_rows_config = partial(backward_config, only=HALVES)


KERNELS = [
    Kernel(
        function=rms_norm_fwd_kernel,
        args={
            "y": "*X", "s": "*X", "rstd": "*fp32", "x": "*X", "residual": "*X", "weight": "*W",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            **strides("y", "x", "residual"),
            "eps": "fp32", "offset": "fp32", "flags": "i32",
        },
        aligned=[
            "y", "s", "x", "residual", "weight", "n",
            *strides("y", "x", "residual"),
        ],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES, "residual": [{"RESIDUAL": 0}, {"RESIDUAL": 1}]},
        # The fastest shapes on an H200. Prefetching later rows (ahead) before a program's own row is slower than after
        # it. Few rows (max_rows) get more threads each, to hide the latency of their loads, and may load the weight
        # early. For many rows, or with a residual, early weights take registers that other loads need. fp32 rows of
        # 16384 columns with a residual need the registers of two programs.
        configs=fewer_when_mixed([
            forward_config(64, 32, 64, 1, 4),
            forward_config(128, 16, 128, 1, 4),
            forward_config(256, 8, 256, 1, 4),
            forward_config(512, 4, 512, 1, 4),
            forward_config(1024, 1, 1024, 1, 2, ahead=1, only=FLOATS),
            forward_config(1024, 2, 1024, 1, 4),
            forward_config(2048, 1, 2048, 1, 4, early=1, max_rows=128),
            forward_config(2048, 1, 2048, 1, 4, ahead=1),
            forward_config(4096, 1, 4096, 1, 8, max_rows=256, only=HALVES),
            forward_config(4096, 1, 4096, 1, 8, early=1, max_rows=256),
            forward_config(3072, 1, 1024, 3, 4, ahead=1),
            forward_config(4096, 1, 4096, 1, 8, ahead=1),
            forward_config(8192, 1, 8192, 1, 16, max_rows=256, only=HALVES),
            forward_config(8192, 1, 8192, 1, 16, early=1, max_rows=256),
            forward_config(5120, 1, 4096, 2, 8, ahead=1, only=FLOATS),
            forward_config(5120, 1, 1024, 5, 4, ahead=1),
            forward_config(6144, 1, 2048, 3, 4, ahead=1),
            forward_config(8192, 1, 4096, 2, 8, ahead=1),
            forward_config(12288, 1, 4096, 3, 16, early=1, max_rows=256),
            forward_config(12288, 1, 4096, 3, 8, ahead=1),
            forward_config(16384, 1, 8192, 2, 16, max_rows=256, only=HALVES),
            forward_config(16384, 1, 8192, 2, 16, early=1, max_rows=128),
            forward_config(16384, 1, 8192, 2, 16, max_rows=256),
            forward_config(14336, 1, 2048, 7, 8, ahead=1),
            forward_config(16384, 1, 4096, 4, 16, 1, ahead=1, only=FLOATS | {"RESIDUAL": (1,)}),
            forward_config(16384, 1, 4096, 4, 16, 2, ahead=1),
            forward_config(32768, 1, 8192, 4, 32, 1, ahead=1),
            forward_config(None, 1, 8192, 0, 16),
            forward_config(64, 32, 64, 1, 4, aligned=False),
            forward_config(512, 4, 512, 1, 4, aligned=False),
            forward_config(None, 1, 2048, 0, 8, aligned=False),
        ]),
    ),
    Kernel(
        function=rms_norm_bwd_kernel,
        args={
            "dx": "*X", "dweight": "*W", "partial": "*fp32", "dy": "*X", "ds": "*X", "x": "*X", "weight": "*W", "rstd": "*fp32",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            **strides("dx", "dy", "ds", "x"),
            "offset": "fp32", "flags": "i32",
        },
        aligned=[
            "dx", "dweight", "partial", "dy", "ds", "x", "weight", "n",
            *strides("dx", "dy", "ds", "x"),
        ],
        axes={"dtype": ACTIVATION_WEIGHT_DTYPES, "residual": [{"RESIDUAL": 0}, {"RESIDUAL": 1}]},
        # The fastest shapes on an H200. 16-bit rows of 1024 to 3072 columns are as fast in registers as streamed,
        # except 2560 columns in bf16. fp32 rows of 16384 columns fit no ring; without a residual, eight warps have
        # registers for them.
        configs=fewer_when_mixed([
            backward_config(64, 32, 64, 1, 4, 6),
            backward_config(128, 16, 128, 1, 4, 6),
            backward_config(256, 8, 256, 1, 4, 5),
            backward_config(512, 4, 512, 1, 4, 5, prefetch=1),
            backward_config(1024, 2, 1024, 1, 4, 5),
            backward_config(2048, 1, 2048, 1, 8, 4, pieces=1, slots=2),
            backward_config(2560, 1, 1024, 3, 4, 3, pieces=1, slots=2, only={"X": ("bf16",), "RESIDUAL": (0,)}),
            backward_config(2560, 1, 1024, 3, 4, 3, pieces=1, slots=2, only=FLOATS | {"RESIDUAL": (1,)}),
            backward_config(2560, 1, 512, 5, 4, 5),
            backward_config(3072, 1, 1024, 3, 8, 4, prefetch=1, only=HALVES),
            few_rows_config(4096, 1, 2048, 2, 8, 3, max_rows=4096, prefetch=1),
            backward_config(4096, 1, 2048, 2, 8, 3, pieces=2, slots=3),
            backward_config(5120, 1, 2048, 3, 8, 2, pieces=1, slots=2, only=HALVES),
            backward_config(6144, 1, 2048, 3, 8, 2, pieces=3, slots=5),
            few_rows_config(8192, 1, 8192, 1, 16, 2, max_rows=512, early=0),
            backward_config(8192, 1, 2048, 4, 8, 1, pieces=2, slots=6),
            few_rows_config(12288, 1, 4096, 3, 32, 1, max_rows=512, prefetch=1),
            backward_config(12288, 1, 4096, 3, 16, 1, pieces=1, slots=2),
            few_rows_config(16384, 1, 8192, 2, 32, 1, max_rows=1024, early=0),
            backward_config(16384, 1, 4096, 4, 16, 1, pieces=2, slots=3, only=HALVES),
            backward_config(16384, 1, 2048, 8, 8, 1, only=FLOATS | {"RESIDUAL": (0,)}),
            backward_config(16384, 1, 8192, 2, 32, 1, early=0),
            backward_config(None, 1, 16384, 0, 32, 1),
            backward_config(64, 16, 64, 1, 4, 4, aligned=False),
            backward_config(512, 4, 512, 1, 4, 4, aligned=False),
            backward_config(None, 1, 2048, 0, 8, 2, aligned=False),
        ]),
    ),
]  # fmt: skip
