"""RMSNorm with a gate, over groups of columns. a = silu(gate) or sigmoid(gate).

    y = x * rsqrt(mean(x^2) + eps) * (weight + offset) * a
    y = v * rsqrt(mean(v^2) + eps) * (weight + offset), v = x * a       (GATE_FIRST)

A row has `groups` groups of n columns, each with statistics of its own. Neighbouring programs process the groups of one
block of rows. Forward and backward are otherwise built like those of rms_norm.py, which explains tiles, loops and
persistent programs. In backward, a program stays with one group, so that it sums one share of the weight's gradient.

The activation is computed again in backward: it costs less than reading it.
"""

from functools import partial

import triton
import triton.language as tl

from ..functions import sigmoid, sigmoid_and_slope
from ..rows import (
    block_and_group,
    block_rows,
    load_parameter,
    load_per_row,
    load_tiles,
    prefetch,
    programs_ahead,
    round_if,
    row_mean,
    row_offset,
    rows_config,
    store_share,
    strides,
    zero_tiles,
)
from ..table import ACTIVATION_WEIGHT_DTYPES, Kernel, fewer_when_mixed

HAS_WEIGHT = tl.constexpr(1)
ROUND_FIRST = tl.constexpr(2)  # rows are rounded before they are multiplied by the weight
ROUND_PRODUCT = tl.constexpr(4)  # and again before they are multiplied by the gate
SAVE_RSTD = tl.constexpr(8)
NEEDS_DX = tl.constexpr(16)
NEEDS_DGATE = tl.constexpr(32)
NEEDS_DWEIGHT = tl.constexpr(64)
FINAL = tl.constexpr(128)
GATE_FIRST = tl.constexpr(256)
SIGMOID = tl.constexpr(512)


@triton.jit
def per_group(row, groups, group):
    """Where the number of a row and group is."""
    return row * groups + group


@triton.jit
def activated(gate, flags):
    s = sigmoid(gate)
    return tl.where((flags & SIGMOID) != 0, s, gate * s)


@triton.jit
def activated_and_slope(gate, flags):
    s, slope = sigmoid_and_slope(gate)
    plain = (flags & SIGMOID) != 0
    return tl.where(plain, s, gate * s), tl.where(plain, slope, s + gate * slope)


@triton.jit
def entering(x, a, flags):
    """What is normalised."""
    x = x.to(tl.float32)
    return tl.where((flags & GATE_FIRST) != 0, x * a, x)


@triton.jit
def weighted(normed, w, flags, dtype: tl.constexpr):
    """The rounded row, and its product with the weight."""
    rounded = round_if(normed, flags & ROUND_FIRST, dtype)
    return rounded, round_if(rounded * w, flags & ROUND_PRODUCT, dtype)


@triton.jit
def rms_norm_gated_fwd_kernel(
    y, rstd, x, gate, weight,
    rows, n, groups, inner_rows, y_outer, y_inner, x_outer, x_inner, gate_outer, gate_inner, eps, offset, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    block, group = block_and_group(tl.program_id(0), groups)
    row = block_rows(block, BLOCK_M)
    row_mask = row < rows
    first = group * n
    x_row = x + row_offset(row, inner_rows, x_outer, x_inner) + first
    gate_row = gate + row_offset(row, inner_rows, gate_outer, gate_inner) + first
    y_row = y + row_offset(row, inner_rows, y_outer, y_inner) + first
    weights = weight + first
    dtype: tl.constexpr = x.dtype.element_ty
    squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    if TILES > 0:
        xs = load_tiles(x_row, row_mask, n, BLOCK_N, TILES)
        gates = load_tiles(gate_row, row_mask, n, BLOCK_N, TILES)
        if AHEAD:
            distance = programs_ahead(TILES * BLOCK_N * dtype.primitive_bitwidth // 8 * 2)
            later, later_group = block_and_group(tl.program_id(0) + distance, groups)
            later_first = later_group * n
            columns = tl.where(later < rows, n, 0)
            prefetch(x + row_offset(later, inner_rows, x_outer, x_inner) + later_first, 0, columns)
            prefetch(gate + row_offset(later, inner_rows, gate_outer, gate_inner) + later_first, 0, columns)
        for t in tl.static_range(TILES):
            value = entering(xs[t], activated(gates[t].to(tl.float32), flags), flags)
            squares += value * value
        scale = tl.rsqrt(row_mean(squares, n) + eps)
        for t in tl.static_range(TILES):
            cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = row_mask & (cols < n)[None, :]
            w = load_parameter(weights, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
            a = activated(gates[t].to(tl.float32), flags)
            _, product = weighted(entering(xs[t], a, flags) * scale, w, flags, dtype)
            tl.store(y_row + cols[None, :], tl.where((flags & GATE_FIRST) != 0, product, product * a), mask=mask)
    else:
        for start in range(0, n, BLOCK_N):
            xs = load_tiles(x_row + start, row_mask, n - start, BLOCK_N, 1)
            gates = load_tiles(gate_row + start, row_mask, n - start, BLOCK_N, 1)
            value = entering(xs[0], activated(gates[0].to(tl.float32), flags), flags)
            squares += value * value
        scale = tl.rsqrt(row_mean(squares, n) + eps)
        for start in range(0, n, BLOCK_N):
            xs = load_tiles(x_row + start, row_mask, n - start, BLOCK_N, 1)
            gates = load_tiles(gate_row + start, row_mask, n - start, BLOCK_N, 1)
            cols = start + tl.arange(0, BLOCK_N)
            mask = row_mask & (cols < n)[None, :]
            w = load_parameter(weights, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
            a = activated(gates[0].to(tl.float32), flags)
            _, product = weighted(entering(xs[0], a, flags) * scale, w, flags, dtype)
            tl.store(y_row + cols[None, :], tl.where((flags & GATE_FIRST) != 0, product, product * a), mask=mask)

    save = row_mask & ((flags & SAVE_RSTD) != 0) & tl.full([BLOCK_M, 1], True, tl.int1)
    tl.store(rstd + per_group(row, groups, group) + tl.zeros([BLOCK_M, 1], tl.int32), scale, mask=save)


@triton.jit
def load_tile(row, row_mask, n, t: tl.constexpr, BLOCK_N: tl.constexpr):
    return load_tiles(row + t * BLOCK_N, row_mask, n - t * BLOCK_N, BLOCK_N, 1)[0]


@triton.jit
def upstream(dy, a, flags):
    """The gradient of the normalised row's product with the weight."""
    dy = dy.to(tl.float32)
    return tl.where((flags & GATE_FIRST) != 0, dy, dy * a)


@triton.jit
def store_gradients(dx, dgate, dv, x, dy, product, a, slope, mask, flags):
    """dv: the gradient of what was normalised."""
    early = (flags & GATE_FIRST) != 0
    of_gate = tl.where(early, dv * x.to(tl.float32), dy.to(tl.float32) * product)
    tl.store(dx, tl.where(early, dv * a, dv), mask=mask & ((flags & NEEDS_DX) != 0))
    tl.store(dgate, of_gate * slope, mask=mask & ((flags & NEEDS_DGATE) != 0))


@triton.jit
def rms_norm_gated_bwd_kernel(
    dx, dgate, dweight, partial, dy, x, gate, weight, rstd,
    rows, n, groups, inner_rows, dx_outer, dx_inner, dgate_outer, dgate_inner, dy_outer, dy_inner, x_outer, x_inner,
    gate_outer, gate_inner, offset, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, RELOAD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    program, group = block_and_group(tl.program_id(0), groups)
    programs = tl.num_programs(0) // groups
    dtype: tl.constexpr = x.dtype.element_ty
    first = group * n
    dx += first
    dgate += first
    dweight += first
    dy += first
    x += first
    gate += first
    weight += first
    # partial: (programs, groups * n)
    partial_row = partial + program.to(tl.int64) * groups * n + first
    sums = zero_tiles(BLOCK_M, BLOCK_N, TILES)

    for block in tl.range(program, tl.cdiv(rows, BLOCK_M), programs):
        row = block_rows(block, BLOCK_M)
        row_mask = row < rows
        x_row = x + row_offset(row, inner_rows, x_outer, x_inner)
        gate_row = gate + row_offset(row, inner_rows, gate_outer, gate_inner)
        dy_row = dy + row_offset(row, inner_rows, dy_outer, dy_inner)
        dx_row = dx + row_offset(row, inner_rows, dx_outer, dx_inner)
        dgate_row = dgate + row_offset(row, inner_rows, dgate_outer, dgate_inner)
        scale = load_per_row(rstd, per_group(row, groups, group), row_mask, BLOCK_M)
        dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

        if TILES > 0:
            if not RELOAD:
                xs = load_tiles(x_row, row_mask, n, BLOCK_N, TILES)
                gates = load_tiles(gate_row, row_mask, n, BLOCK_N, TILES)
                dys = load_tiles(dy_row, row_mask, n, BLOCK_N, TILES)
            if AHEAD:
                later = block_rows(block + programs, BLOCK_M)
                columns = tl.where(later < rows, n, 0)
                prefetch(x + row_offset(later, inner_rows, x_outer, x_inner), 0, columns)
                prefetch(gate + row_offset(later, inner_rows, gate_outer, gate_inner), 0, columns)
                prefetch(dy + row_offset(later, inner_rows, dy_outer, dy_inner), 0, columns)
            new_sums = ()
            for t in tl.static_range(TILES):
                cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                if RELOAD:
                    value = load_tile(x_row, row_mask, n, t, BLOCK_N)
                    z = load_tile(gate_row, row_mask, n, t, BLOCK_N)
                    dvalue = load_tile(dy_row, row_mask, n, t, BLOCK_N)
                else:
                    value = xs[t]
                    z = gates[t]
                    dvalue = dys[t]
                a, _ = activated_and_slope(z.to(tl.float32), flags)
                normed = entering(value, a, flags) * scale
                rounded, _ = weighted(normed, w, flags, dtype)
                grad = upstream(dvalue, a, flags)
                new_sums = new_sums + (sums[t] + grad * rounded,)
                dots += grad * w * normed
            sums = new_sums
            mean = row_mean(dots, n)
            if RELOAD:
                # Else the compiler would keep the tiles, and all that follows from them, in registers.
                tl.debug_barrier()
            for t in tl.static_range(TILES):
                cols = t * BLOCK_N + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                if RELOAD:
                    value = load_tile(x_row, row_mask, n, t, BLOCK_N)
                    z = load_tile(gate_row, row_mask, n, t, BLOCK_N)
                    dvalue = load_tile(dy_row, row_mask, n, t, BLOCK_N)
                else:
                    value = xs[t]
                    z = gates[t]
                    dvalue = dys[t]
                a, slope = activated_and_slope(z.to(tl.float32), flags)
                normed = entering(value, a, flags) * scale
                _, product = weighted(normed, w, flags, dtype)
                dv = (upstream(dvalue, a, flags) * w - normed * mean) * scale
                store_gradients(
                    dx_row + cols[None, :], dgate_row + cols[None, :], dv, value, dvalue, product, a, slope, mask, flags
                )
        else:
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                z = tl.load(gate_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                a, _ = activated_and_slope(z, flags)
                normed = entering(tl.load(x_row + cols[None, :], mask=mask, other=0.0), a, flags) * scale
                grad = upstream(tl.load(dy_row + cols[None, :], mask=mask, other=0.0), a, flags)
                dots += grad * w * normed
            mean = row_mean(dots, n)
            for start in range(0, n, BLOCK_N):
                cols = start + tl.arange(0, BLOCK_N)
                mask = row_mask & (cols < n)[None, :]
                w = load_parameter(weight, cols, n, flags & HAS_WEIGHT, 1.0)[None, :] + offset
                z = tl.load(gate_row + cols[None, :], mask=mask, other=0.0).to(tl.float32)
                a, slope = activated_and_slope(z, flags)
                value = tl.load(x_row + cols[None, :], mask=mask, other=0.0)
                dvalue = tl.load(dy_row + cols[None, :], mask=mask, other=0.0)
                normed = entering(value, a, flags) * scale
                rounded, product = weighted(normed, w, flags, dtype)
                grad = upstream(dvalue, a, flags)
                dv = (grad * w - normed * mean) * scale
                store_gradients(
                    dx_row + cols[None, :], dgate_row + cols[None, :], dv, value, dvalue, product, a, slope, mask, flags
                )
                share = tl.sum(grad * rounded, axis=0)
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


# Y: the result's dtype. With GATE_FIRST, a wider weight makes the result wider.
DTYPES = [point | {"Y": point["X"]} for point in ACTIVATION_WEIGHT_DTYPES]
DTYPES += [{"X": x, "W": "fp32", "Y": "fp32"} for x in ("bf16", "fp16")]

forward_config = partial(rows_config, ahead=0)
backward_config = partial(rows_config, reload=0, ahead=0)


KERNELS = [
    Kernel(
        function=rms_norm_gated_fwd_kernel,
        args={
            "y": "*Y", "rstd": "*fp32", "x": "*X", "gate": "*X", "weight": "*W",
            "rows": "i32", "n": "i32", "groups": "i32", "inner_rows": "i32",
            **strides("y", "x", "gate"),
            "eps": "fp32", "offset": "fp32", "flags": "i32",
        },
        aligned=[
            "y", "x", "gate", "weight", "n", *strides("y", "x", "gate"),
        ],
        axes={"dtype": DTYPES},
        # By the shapes of rms_norm with a residual, which moves as much.
        configs=fewer_when_mixed([
            forward_config(64, 32, 64, 1, 4),
            forward_config(128, 16, 128, 1, 4),
            forward_config(256, 8, 256, 1, 4),
            forward_config(512, 4, 512, 1, 4),
            forward_config(1024, 2, 1024, 1, 4),
            forward_config(2048, 1, 2048, 1, 4, ahead=1),
            forward_config(3072, 1, 1024, 3, 4, ahead=1),
            forward_config(4096, 1, 4096, 1, 8, ahead=1),
            forward_config(6144, 1, 2048, 3, 8, ahead=1),
            forward_config(8192, 1, 4096, 2, 8, ahead=1),
            forward_config(16384, 1, 4096, 4, 16, ahead=1),
            forward_config(None, 1, 8192, 0, 16),
            forward_config(64, 32, 64, 1, 4, aligned=False),
            forward_config(512, 4, 512, 1, 4, aligned=False),
            forward_config(None, 1, 2048, 0, 8, aligned=False),
        ]),
    ),
    Kernel(
        function=rms_norm_gated_bwd_kernel,
        args={
            "dx": "*X", "dgate": "*X", "dweight": "*W", "partial": "*fp32", "dy": "*Y", "x": "*X", "gate": "*X",
            "weight": "*W", "rstd": "*fp32",
            "rows": "i32", "n": "i32", "groups": "i32", "inner_rows": "i32",
            **strides("dx", "dgate", "dy", "x", "gate"),
            "offset": "fp32", "flags": "i32",
        },
        aligned=[
            "dx", "dgate", "dweight", "partial", "dy", "x", "gate", "weight", "n",
            *strides("dx", "dgate", "dy", "x", "gate"),
        ],
        axes={"dtype": DTYPES},
        # Three inputs, the activation and its slope take many registers: a thread has 8 columns of a row, or loads them
        # twice (RELOAD), the second time from a cache.
        configs=fewer_when_mixed([
            backward_config(64, 16, 64, 1, 8, 4),
            backward_config(128, 8, 128, 1, 8, 4),
            backward_config(256, 4, 256, 1, 8, 4),
            backward_config(512, 2, 512, 1, 4, 4),
            backward_config(1024, 1, 1024, 1, 4, 5),
            backward_config(2048, 1, 2048, 1, 8, 3),
            backward_config(3072, 1, 1024, 3, 8, 2),
            backward_config(4096, 1, 4096, 1, 16, 1, ahead=1),
            backward_config(8192, 1, 4096, 2, 16, 1, reload=1, ahead=1),
            backward_config(16384, 1, 4096, 4, 16, 1, reload=1, ahead=1),
            backward_config(None, 1, 8192, 0, 32, 1),
            backward_config(64, 8, 64, 1, 4, 4, aligned=False),
            backward_config(512, 2, 512, 1, 4, 3, aligned=False),
            backward_config(None, 1, 2048, 0, 8, 2, aligned=False),
        ]),
    ),
]  # fmt: skip
