"""Cross entropy of rows of logits against class indices. For a row with true class y out of n:

    x    = logits, or cap * tanh(logits / cap) with a softcap
    lse  = log(sum_j exp(x_j))
    loss = (1 - s) * w_y * (lse - x_y) + s / n * sum_j w_j * (lse - x_j) + lse_square_scale * lse^2

s is label_smoothing, w the class weights. EXTRAS = 0 leaves out what costs time per logit: weights, smoothing, softcap.

Forward: one program reads a row once. Every thread keeps its own maximum and sum, so that the loop has no barrier
and one exp per logit; threads meet at the end. The true class stays out of the sums and joins last: 1 - p_y and
small losses then keep all their digits however confident the prediction. `stats` holds three numbers a row for
backward: the largest logit, the sum of exponentials relative to it, and 1 - p_y.

Backward: a gradient depends on its logit and the row's statistics alone; programs share rows out in spans, and
may write over what they read. fwd_bwd does both, row by row, and finds its second read in the L2 cache.

A row whose target is ignore_index is not read: loss and gradient are 0, the predicted class is -1. A target out of
range reads nothing out of bounds: its row's loss and gradient are NaN. Targets are int32 words, two for an int64.
`totals` are the divisors of a mean, (sum of w_y, number of targets); they never leave the device.
"""

import triton
import triton.language as tl

from .rows import row_offset
from .table import Config, Kernel

HAS_WEIGHT = tl.constexpr(1)
HAS_SMOOTHING = tl.constexpr(2)
HAS_SOFTCAP = tl.constexpr(4)
SAVE_STATS = tl.constexpr(8)
SAVE_Z_LOSS = tl.constexpr(16)
SAVE_METRICS = tl.constexpr(32)
ADD_Z_LOSS = tl.constexpr(64)  # to every row's loss; reductions add it later, for its mean has another divisor
MEAN = tl.constexpr(128)
FROM_PARTIAL = tl.constexpr(256)
TO_PARTIAL = tl.constexpr(512)
SAVE_TOTALS = tl.constexpr(1024)
HAS_GRAD = tl.constexpr(2048)
COUNT_ONLY = tl.constexpr(4096)

LOG2E = tl.constexpr(1.4426950408889634)
# Maximum of no logit: finite, because -inf - -inf is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_target(target, row, words, mask):
    low = tl.load(target + row.to(tl.int64) * words, mask=mask, other=0)
    high = tl.load(target + row.to(tl.int64) * words + (words - 1), mask=mask, other=0)
    wide = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    return tl.where(words == 2, wide, low.to(tl.int64))


@triton.jit
def load_weight(weight, classes, mask, flags):
    return tl.load(weight + classes, mask=mask & ((flags & HAS_WEIGHT) != 0), other=1.0)


@triton.jit
def softcapped(x, cap):
    """cap * tanh(x / cap) and its slope, without cancellation at either end."""
    z = x / cap
    size = tl.abs(z)
    q = z * z
    # tanh(z) = z + z * bend, interpolated in z^2 at the Chebyshev nodes of |z| <= 0.6: within 1.1e-8.
    bend = q * (-0.33333330 + q * (0.13332915 + q * (-0.053873949 + q * (0.021110959 + q * -0.0062691197))))
    near = z + z * bend
    # tanh(|z|) = 1 - 2 u
    e = tl.exp2(size * (-2 * LOG2E))
    u = e / (1 + e)
    far = cap - 2 * cap * u
    small = size < 0.6
    value = tl.where(small, x + x * bend, tl.where(z < 0, -far, far))
    return value, tl.where(small, 1 - near * near, 4 * u * (1 - u))


@triton.jit
def log1p(x):
    """For x >= 0. Dividing by what 1 + x became undoes the rounding of the addition."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def lane_columns(dtype: tl.constexpr, LANES: tl.constexpr, STRIPED: tl.constexpr):
    """Columns of one tile: each lane has 16 bytes, side by side where alignment admits one access, else striped."""
    VEC: tl.constexpr = 128 // dtype.primitive_bitwidth
    lane = tl.arange(0, LANES)[:, None]
    item = tl.arange(0, VEC)[None, :]
    return lane + item * LANES if STRIPED else lane * VEC + item


@triton.jit
def scan_tiles(
    peak, total, tilt, best, row, start, n, y, reference, weight, softcap, flags,
    LANES: tl.constexpr, TILES: tl.constexpr, STRIPED: tl.constexpr, EXTRAS: tl.constexpr, WHOLE: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Takes TILES tiles into the lanes' statistics. WHOLE: all within the row, the true class not among them."""
    dtype: tl.constexpr = row.dtype.element_ty
    TILE: tl.constexpr = LANES * (128 // dtype.primitive_bitwidth)
    cols = lane_columns(dtype, LANES, STRIPED) + start
    raw = ()
    for t in tl.static_range(TILES):
        if WHOLE:
            x = tl.load(row + cols + t * TILE, eviction_policy=POLICY)
        else:
            x = tl.load(row + cols + t * TILE, mask=cols + t * TILE < n, other=float("-inf"), eviction_policy=POLICY)
        raw = raw + (x,)

    xs = ()
    new_peak = peak
    for t in tl.static_range(TILES):
        x = raw[t].to(tl.float32)
        if not WHOLE:
            x = tl.where(cols + t * TILE == y, float("-inf"), x)
        new_peak = tl.maximum(new_peak, tl.max(x, axis=1))
        xs = xs + (x,)
    best = tl.where(new_peak > peak, start, best)

    base = peak
    new_base = new_peak
    if EXTRAS:
        if flags & HAS_SOFTCAP:
            base, _ = softcapped(peak, softcap)
            new_base, _ = softcapped(new_peak, softcap)
    total *= tl.exp2((base - new_base) * LOG2E)
    for t in tl.static_range(TILES):
        x = xs[t]
        if EXTRAS:
            at = cols + t * TILE
            keep = (at < n) & (at != y)
            if flags & HAS_SOFTCAP:
                x, _ = softcapped(x, softcap)
                x = tl.where(keep, x, float("-inf"))
            w = load_weight(weight, at, at < n, flags)
            tilt += tl.sum(tl.where(keep, w * (x - reference), 0.0), axis=1)
        total += tl.sum(tl.exp2((x - new_base[:, None]) * LOG2E), axis=1)
    return new_peak, total, tilt, best


@triton.jit
def scan_row(
    row, n, y, x_y, reference, weight, softcap, flags,
    LANES: tl.constexpr, TILES: tl.constexpr, STRIPED: tl.constexpr, EXTRAS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """One read of a row: (top, total, miss, nll, tilt, predicted).

    top: largest x, total: sum_j exp(x_j - top), miss: 1 - p_y, nll: lse - x_y,
    tilt: sum_j w_j * (x_j - reference) for j != y
    """
    dtype: tl.constexpr = row.dtype.element_ty
    TILE: tl.constexpr = LANES * (128 // dtype.primitive_bitwidth)
    peak = tl.full([LANES], LOWEST, tl.float32)
    lane_total = tl.zeros([LANES], tl.float32)
    tilt = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    y = y.to(tl.int32)
    # Extras need registers, and so much arithmetic that loads hide behind it.
    GROUP: tl.constexpr = 1 if EXTRAS else TILES
    for start in range(0, n, GROUP * TILE):
        whole = (start + GROUP * TILE <= n) & ((y < start) | (y >= start + GROUP * TILE))
        if EXTRAS or not whole:
            peak, lane_total, tilt, best = scan_tiles(
                peak, lane_total, tilt, best, row, start, n, y, reference, weight, softcap, flags,
                LANES, GROUP, STRIPED, EXTRAS, False, POLICY,
            )  # fmt: skip
        else:
            peak, lane_total, tilt, best = scan_tiles(
                peak, lane_total, tilt, best, row, start, n, y, reference, weight, softcap, flags,
                LANES, GROUP, STRIPED, EXTRAS, True, POLICY,
            )  # fmt: skip

    raw_others = tl.max(peak, axis=0)
    lane_base = peak
    top_others = raw_others
    true = x_y
    if EXTRAS:
        if flags & HAS_SOFTCAP:
            lane_base, _ = softcapped(peak, softcap)
            top_others, _ = softcapped(raw_others, softcap)
            true, _ = softcapped(x_y, softcap)
    others = tl.sum(lane_total * tl.exp2((lane_base - top_others) * LOG2E), axis=0)
    top = tl.maximum(true, top_others)
    others *= tl.exp2((top_others - top) * LOG2E)
    total = tl.exp2((true - top) * LOG2E) + others
    nll = top - true + tl.where(true >= top_others, log1p(others), tl.log(total))

    predicted = tl.full([], -1, tl.int32)
    if flags & SAVE_METRICS:
        # Only lanes that hold the maximum look again, at the tiles where they first met it.
        cols = lane_columns(dtype, LANES, STRIPED) + best[:, None]
        first = tl.full([LANES], 0x7FFFFFFF, tl.int32)
        for t in tl.static_range(GROUP):
            at = cols + t * TILE
            mask = (at < n) & (peak == raw_others)[:, None]
            x = tl.load(row + at, mask=mask, other=float("-inf")).to(tl.float32)
            found = mask & (at != y) & (x == raw_others)
            first = tl.minimum(first, tl.min(tl.where(found, at, 0x7FFFFFFF), axis=1))
        predicted = tl.min(first, axis=0)
        predicted = tl.where((x_y > raw_others) | ((x_y == raw_others) & (y < predicted)), y, predicted)
        # A row of -inf or NaN alone.
        predicted = tl.where(predicted == 0x7FFFFFFF, 0, predicted)
    return top, total, others / total, nll, tl.sum(tilt, axis=0), predicted


@triton.jit
def row_losses(
    top, total, nll, tilt, x_y, reference, w_y, weight_sum, n, label_smoothing, lse_square_scale, flags,
    EXTRAS: tl.constexpr,
):  # fmt: skip
    lse = top + tl.log(total)
    z_loss = lse_square_scale * lse * lse
    loss = nll
    if EXTRAS:
        loss = w_y * nll
        if flags & HAS_SMOOTHING:
            # Distances from x_y rather than from 0: no digits lost to a common offset of the logits.
            level = tl.where(reference == x_y, nll, lse - reference)
            away = tl.where(reference == x_y, 0.0, x_y - reference)
            smooth = level * weight_sum - tilt - w_y * away
            loss = (1 - label_smoothing) * loss + label_smoothing / n * smooth
    return loss, z_loss


@triton.jit
def store_row(loss, z_loss, accuracy, predicted, row, row_loss, row_z_loss, row_predicted, y, flags):
    add = tl.where((flags & ADD_Z_LOSS) != 0, row_z_loss, 0.0)
    tl.store(loss + row, row_loss + add)
    tl.store(z_loss + row, row_z_loss, mask=(flags & SAVE_Z_LOSS) != 0)
    metrics = (flags & SAVE_METRICS) != 0
    tl.store(accuracy + row, tl.where((row_predicted >= 0) & (row_predicted == y), 1.0, 0.0), mask=metrics)
    tl.store(predicted + row, row_predicted.to(tl.int64), mask=metrics)


@triton.jit
def forward_row(
    loss, z_loss, accuracy, predicted, row, x_row, y, weight, weight_sum,
    n, label_smoothing, lse_square_scale, softcap, flags,
    LANES: tl.constexpr, TILES: tl.constexpr, STRIPED: tl.constexpr, EXTRAS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Losses and metrics of one row with a target; (top, total, miss) for its gradient."""
    valid = (y >= 0) & (y < n)
    x_y = tl.load(x_row + y, mask=valid, other=float("nan")).to(tl.float32)
    reference = x_y
    w_y = 1.0
    sum_w = n.to(tl.float32)
    if EXTRAS:
        if flags & HAS_SOFTCAP:
            reference, _ = softcapped(x_y, softcap)
        w_y = load_weight(weight, y, valid, flags)
        if flags & HAS_SMOOTHING:
            sum_w = tl.load(weight_sum, mask=(flags & HAS_WEIGHT) != 0, other=sum_w)
    true = reference
    reference = tl.where(true == float("-inf"), 0.0, true)
    # An invalid y matches no column.
    top, total, miss, nll, tilt, best = scan_row(
        x_row, n, tl.where(valid, y, -1), x_y, reference, weight, softcap, flags, LANES, TILES, STRIPED, EXTRAS, POLICY
    )
    row_loss, row_z_loss = row_losses(
        top, total, nll, tilt, true, reference, w_y, sum_w, n, label_smoothing, lse_square_scale, flags, EXTRAS
    )
    store_row(loss, z_loss, accuracy, predicted, row, row_loss, row_z_loss, best, y, flags)
    return top, total, miss


@triton.jit
def cross_entropy_fwd_kernel(
    loss, z_loss, accuracy, predicted, stats, logits, target, weight, weight_sum,
    rows, n, inner_rows, logits_outer, logits_inner, target_words, ignore_index,
    label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, STRIPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    y = load_target(target, row, target_words, True)
    if y == ignore_index:
        store_row(loss, z_loss, accuracy, predicted, row, 0.0, 0.0, tl.full([], -1, tl.int32), y, flags)
    else:
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        top, total, miss = forward_row(
            loss, z_loss, accuracy, predicted, row, x_row, y, weight, weight_sum,
            n, label_smoothing, lse_square_scale, softcap, flags, LANES, TILES, STRIPED, EXTRAS, "evict_first",
        )  # fmt: skip
        save = (flags & SAVE_STATS) != 0
        tl.store(stats + row, top, mask=save)
        tl.store(stats + rows.to(tl.int64) + row, total, mask=save)
        tl.store(stats + rows.to(tl.int64) * 2 + row, miss, mask=save)


@triton.jit
def gradient_span(
    out, x_row, begin, end, n, y, top, total, miss, grad, totals, weight, weight_sum,
    label_smoothing, lse_square_scale, softcap, flags,
    BLOCK_N: tl.constexpr, EXTRAS: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """Gradient of the columns begin..end of one row; grad: what arrives for the row's (or the reduced) loss."""
    mean = (flags & MEAN) != 0
    grad_z = tl.where(mean, grad / tl.load(totals + 1, mask=mean, other=1.0), grad)
    grad = tl.where(mean, grad / tl.load(totals, mask=mean, other=1.0), grad)
    # d loss / d x_k = p_k * (pull + spill) - tilt * w_k, and for the true class
    #                  p_y * spill - (1 - p_y) * pull - tilt * w_y
    pull = grad
    spill = grad_z * 2 * lse_square_scale * (top + tl.log(total))
    tilt = 0.0
    if EXTRAS:
        valid = (y >= 0) & (y < n)
        w_y = load_weight(weight, y, valid, flags)
        pull = grad * w_y
        if flags & HAS_SMOOTHING:
            pull *= 1 - label_smoothing
            tilt = grad * label_smoothing / n
            mean_weight = tl.load(weight_sum, mask=(flags & HAS_WEIGHT) != 0, other=n.to(tl.float32)) / n
            spill += grad * label_smoothing * mean_weight
    slope = (pull + spill) / total
    slope_y = spill / total
    drop_y = pull * miss
    y = y.to(tl.int32)

    BLOCK: tl.constexpr = BLOCK_N // 4 if EXTRAS else BLOCK_N
    for block in range(0, end - begin, BLOCK):
        # What was read last is likeliest in the cache still.
        start = begin + ((end - begin - 1) // BLOCK * BLOCK - block if BACKWARDS else block)
        cols = start + tl.arange(0, BLOCK)
        mask = cols < end
        x = tl.load(x_row + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if EXTRAS:
            chain = tl.full([BLOCK], 1.0, tl.float32)
            if flags & HAS_SOFTCAP:
                x, chain = softcapped(x, softcap)
            drop = tl.where(cols == y, drop_y, 0.0) + tilt * load_weight(weight, cols, mask, flags)
            e = tl.exp2((x - top) * LOG2E)
            dx = (e * tl.where(cols == y, slope_y, slope) - drop) * chain
        else:
            e = tl.exp2((x - top) * LOG2E)
            dx = e * tl.where(cols == y, slope_y, slope) - tl.where(cols == y, drop_y, 0.0)
        tl.store(out + cols, dx.to(out.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def zero_span(out, begin, end, BLOCK_N: tl.constexpr):
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        tl.store(out + cols, tl.zeros([BLOCK_N], out.dtype.element_ty), mask=cols < end)


@triton.jit
def cross_entropy_bwd_kernel(
    dlogits, logits, target, stats, grad, totals, weight, weight_sum,
    rows, n, inner_rows, dlogits_outer, dlogits_inner, logits_outer, logits_inner, target_words, grad_stride,
    ignore_index, label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    spans = tl.cdiv(n, BLOCK_N * BLOCKS)
    row = tl.program_id(0) // spans
    begin = (tl.program_id(0) - row * spans) * (BLOCK_N * BLOCKS)
    end = tl.minimum(n, begin + BLOCK_N * BLOCKS)
    out = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
    y = load_target(target, row, target_words, True)
    if y == ignore_index:
        zero_span(out, begin, end, BLOCK_N)
    else:
        top = tl.load(stats + row)
        total = tl.load(stats + rows.to(tl.int64) + row)
        miss = tl.load(stats + rows.to(tl.int64) * 2 + row)
        gradient_span(
            out, logits + row_offset(row, inner_rows, logits_outer, logits_inner), begin, end, n, y, top, total, miss,
            tl.load(grad + row.to(tl.int64) * grad_stride), totals, weight, weight_sum,
            label_smoothing, lse_square_scale, softcap, flags, BLOCK_N, EXTRAS, False,
        )  # fmt: skip


@triton.jit
def cross_entropy_fwd_bwd_kernel(
    loss, z_loss, accuracy, predicted, dlogits, logits, target, grad, totals, weight, weight_sum,
    rows, n, inner_rows, dlogits_outer, dlogits_inner, logits_outer, logits_inner, target_words, grad_stride,
    ignore_index, label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, STRIPED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    out = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
    y = load_target(target, row, target_words, True)
    if y == ignore_index:
        store_row(loss, z_loss, accuracy, predicted, row, 0.0, 0.0, tl.full([], -1, tl.int32), y, flags)
        zero_span(out, 0, n, BLOCK_N)
    else:
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        top, total, miss = forward_row(
            loss, z_loss, accuracy, predicted, row, x_row, y, weight, weight_sum,
            n, label_smoothing, lse_square_scale, softcap, flags, LANES, TILES, STRIPED, EXTRAS, "evict_last",
        )  # fmt: skip
        # No thread may write over a logit that another has yet to read.
        tl.debug_barrier()
        row_grad = tl.load(grad + row.to(tl.int64) * grad_stride, mask=(flags & HAS_GRAD) != 0, other=1.0)
        gradient_span(
            out, x_row, 0, n, n, y, top, total, miss, row_grad, totals, weight, weight_sum,
            label_smoothing, lse_square_scale, softcap, flags, BLOCK_N, EXTRAS, True,
        )  # fmt: skip


@triton.jit
def cross_entropy_scale_kernel(
    dlogits, grad, n, inner_rows, dlogits_outer, dlogits_inner, grad_stride, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):
    """Multiplies a gradient that was made in forward by what arrives for the loss; where that is 1, touches nothing."""
    spans = tl.cdiv(n, BLOCK_N * BLOCKS)
    row = tl.program_id(0) // spans
    begin = (tl.program_id(0) - row * spans) * (BLOCK_N * BLOCKS)
    end = tl.minimum(n, begin + BLOCK_N * BLOCKS)
    scale = tl.load(grad + row.to(tl.int64) * grad_stride)
    if scale != 1.0:
        at = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
        for start in range(begin, end, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            dx = tl.load(at + cols, mask=cols < end, other=0.0).to(tl.float32) * scale
            tl.store(at + cols, dx.to(dlogits.dtype.element_ty), mask=cols < end)


@triton.jit
def cross_entropy_sum_kernel(
    loss_out, z_loss_out, accuracy_out, totals, partial, loss, z_loss, accuracy, target, weight,
    rows, n, target_words, ignore_index, flags,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses and metrics of all rows, added up in a fixed order.

    One program does it all; for very many rows, programs leave `partial` sums of 5 numbers for one that follows.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    sum_loss = tl.zeros([BLOCK], tl.float32)
    sum_z = tl.zeros([BLOCK], tl.float32)
    sum_right = tl.zeros([BLOCK], tl.float32)
    sum_weight = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for block in range(program, tl.cdiv(rows, BLOCK), programs):
        row = block * BLOCK + tl.arange(0, BLOCK)
        inside = row < rows
        if flags & FROM_PARTIAL:
            at = partial + row.to(tl.int64) * 5
            sum_loss += tl.load(at, mask=inside, other=0.0)
            sum_z += tl.load(at + 1, mask=inside, other=0.0)
            sum_right += tl.load(at + 2, mask=inside, other=0.0)
            sum_weight += tl.load(at + 3, mask=inside, other=0.0)
            count += tl.load(at + 4, mask=inside, other=0.0)
        else:
            y = load_target(target, row, target_words, inside)
            counted = inside & (y != ignore_index)
            sum_loss += tl.load(loss + row, mask=counted & ((flags & COUNT_ONLY) == 0), other=0.0)
            sum_z += tl.load(z_loss + row, mask=counted & ((flags & SAVE_Z_LOSS) != 0), other=0.0)
            sum_right += tl.load(accuracy + row, mask=counted & ((flags & SAVE_METRICS) != 0), other=0.0)
            in_range = counted & (y >= 0) & (y < n)
            w = tl.load(weight + y, mask=in_range & ((flags & HAS_WEIGHT) != 0), other=1.0)
            sum_weight += tl.where(counted, w, 0.0)
            count += tl.where(counted, 1.0, 0.0)

    all_loss = tl.sum(sum_loss, axis=0)
    all_z = tl.sum(sum_z, axis=0)
    all_right = tl.sum(sum_right, axis=0)
    all_weight = tl.sum(sum_weight, axis=0)
    all_count = tl.sum(count, axis=0)
    if flags & TO_PARTIAL:
        at = partial + program.to(tl.int64) * 5
        tl.store(at, all_loss)
        tl.store(at + 1, all_z)
        tl.store(at + 2, all_right)
        tl.store(at + 3, all_weight)
        tl.store(at + 4, all_count)
    else:
        tl.store(totals, all_weight, mask=(flags & SAVE_TOTALS) != 0)
        tl.store(totals + 1, all_count, mask=(flags & SAVE_TOTALS) != 0)
        if flags & MEAN:
            # 0 / 0 without any target: NaN, as in PyTorch.
            all_loss /= all_weight
            all_z /= all_count
            all_right /= all_count
        tl.store(loss_out, all_loss + all_z, mask=(flags & COUNT_ONLY) == 0)
        tl.store(z_loss_out, all_z, mask=(flags & SAVE_METRICS) != 0)
        tl.store(accuracy_out, all_right, mask=(flags & SAVE_METRICS) != 0)


def forward_config(max_n, lanes, tiles, aligned=True):
    constexprs = dict(LANES=lanes, TILES=tiles, STRIPED=int(not aligned))
    return Config(max_n, aligned, lanes // 32, constexprs=constexprs)


def backward_config(max_n, block_n, blocks, num_warps, aligned=True):
    return Config(max_n, aligned, num_warps, constexprs=dict(BLOCK_N=block_n, BLOCKS=blocks))


def both_config(max_n, lanes, tiles, block_n, aligned=True):
    constexprs = dict(LANES=lanes, TILES=tiles, STRIPED=int(not aligned), BLOCK_N=block_n)
    return Config(max_n, aligned, lanes // 32, constexprs=constexprs)


AXES = {"dtype": [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}], "extras": [{"EXTRAS": 0}, {"EXTRAS": 1}]}

KERNELS = [
    Kernel(
        function=cross_entropy_fwd_kernel,
        args={
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "predicted": "*i64", "stats": "*fp32",
            "logits": "*X", "target": "*i32", "weight": "*fp32", "weight_sum": "*fp32",
            "rows": "i32", "n": "i32", "inner_rows": "i32", "logits_outer": "i64", "logits_inner": "i64",
            "target_words": "i32", "ignore_index": "i64",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["logits", "weight", "n", "logits_outer", "logits_inner"],
        axes=AXES,
        configs=[
            forward_config(1024, 32, 4),
            forward_config(4096, 128, 4),
            forward_config(None, 256, 4),
            forward_config(4096, 128, 4, aligned=False),
            forward_config(None, 256, 4, aligned=False),
        ],
    ),
    Kernel(
        function=cross_entropy_bwd_kernel,
        args={
            "dlogits": "*X", "logits": "*X", "target": "*i32", "stats": "*fp32", "grad": "*fp32", "totals": "*fp32",
            "weight": "*fp32", "weight_sum": "*fp32",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            "dlogits_outer": "i64", "dlogits_inner": "i64", "logits_outer": "i64", "logits_inner": "i64",
            "target_words": "i32", "grad_stride": "i64", "ignore_index": "i64",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["dlogits", "logits", "weight", "n", "dlogits_outer", "dlogits_inner", "logits_outer", "logits_inner"],
        axes=AXES,
        configs=[
            backward_config(1024, 1024, 1, 1),
            backward_config(4096, 4096, 1, 4),
            backward_config(None, 8192, 2, 8),
            backward_config(1024, 1024, 1, 1, aligned=False),
            backward_config(None, 4096, 4, 8, aligned=False),
        ],
    ),
    Kernel(
        function=cross_entropy_fwd_bwd_kernel,
        args={
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "predicted": "*i64",
            "dlogits": "*X", "logits": "*X", "target": "*i32", "grad": "*fp32", "totals": "*fp32",
            "weight": "*fp32", "weight_sum": "*fp32",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            "dlogits_outer": "i64", "dlogits_inner": "i64", "logits_outer": "i64", "logits_inner": "i64",
            "target_words": "i32", "grad_stride": "i64", "ignore_index": "i64",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["dlogits", "logits", "weight", "n", "dlogits_outer", "dlogits_inner", "logits_outer", "logits_inner"],
        axes=AXES,
        configs=[
            both_config(4096, 128, 4, 4096),
            both_config(65536, 256, 4, 8192),
            both_config(None, 512, 8, 16384),
            both_config(4096, 128, 4, 4096, aligned=False),
            both_config(None, 256, 4, 4096, aligned=False),
        ],
    ),
    Kernel(
        function=cross_entropy_scale_kernel,
        args={
            "dlogits": "*X", "grad": "*fp32", "n": "i32", "inner_rows": "i32",
            "dlogits_outer": "i64", "dlogits_inner": "i64", "grad_stride": "i64",
        },
        aligned=["dlogits", "n", "dlogits_outer", "dlogits_inner"],
        axes={"dtype": AXES["dtype"]},
        configs=[backward_config(None, 8192, 4, 8), backward_config(None, 4096, 4, 8, aligned=False)],
    ),
    Kernel(
        function=cross_entropy_sum_kernel,
        args={
            "loss_out": "*fp32", "z_loss_out": "*fp32", "accuracy_out": "*fp32", "totals": "*fp32", "partial": "*fp32",
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "target": "*i32", "weight": "*W",
            "rows": "i32", "n": "i32", "target_words": "i32", "ignore_index": "i64", "flags": "i32",
        },
        aligned=[],
        axes={"dtype": [{"W": "fp32"}]},
        configs=[Config(None, False, 32, constexprs=dict(BLOCK=4096))],
    ),
]  # fmt: skip
