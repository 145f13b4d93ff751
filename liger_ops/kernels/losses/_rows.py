"""Shared code of the loss kernels that read rows of logits: tiles, skewed rows, split rows, the loss of a row."""

import triton
import triton.language as tl

from ..functions import log1p
from ..kept import await_kept, read_kept
from ..rows import LOG2E
from ._flags import (
    ADD_Z_LOSS,
    BOUNDARY,
    HAS_SMOOTHING,
    HAS_SOFTCAP,
    HAS_WEIGHT,
    LN2,
    LOCAL,
    LOG2E_TAIL,
    LOWEST,
    MOST_PARTS,
    NOWHERE,
    SAVE_METRICS,
    SAVE_Z_LOSS,
)


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
def exp(x, dtype: tl.constexpr):
    """exp(x) for x <= 0. For fp32 logits it corrects the rounding of the exponent; 16-bit logits do not need this."""
    if dtype.primitive_bitwidth < 32:
        return tl.exp2(x * LOG2E)
    # exp is 0 below this; the limit avoids -inf - -inf.
    x = tl.maximum(x, -1000.0, propagate_nan=tl.PropagateNan.ALL)
    power = x * LOG2E
    e = tl.exp2(power)
    return e + e * ((tl.fma(x, LOG2E, -power) + x * LOG2E_TAIL) * LN2)


@triton.jit
def exponent(x):
    """x * log2(e); finite for LOWEST."""
    return tl.maximum(x * LOG2E, LOWEST)


@triton.jit
def exp_over(x, base, dtype: tl.constexpr):
    """exp(x - base) for x <= base. For 16-bit logits it takes one multiply-add and yields exp(x) / 2 ** exponent(base);
    base_correction(base) is the factor between the two."""
    if dtype.primitive_bitwidth < 32:
        e = tl.exp2(tl.fma(x, LOG2E, -exponent(base)))
    else:
        e = exp(x - base, dtype)
    return e


@triton.jit
def base_correction(base, dtype: tl.constexpr):
    factor = tl.full(base.shape, 1.0, tl.float32)
    if dtype.primitive_bitwidth < 32:
        factor = tl.exp2(tl.where(base == LOWEST, 0.0, -tl.fma(base, LOG2E, -exponent(base))))
    return factor


@triton.jit
def rebased(total, base, new_base, dtype: tl.constexpr):
    """Converts a sum of exp_over(x, base) to a sum of exp_over(x, new_base)."""
    if dtype.primitive_bitwidth < 32:
        total *= tl.exp2(exponent(base) - exponent(new_base))
    else:
        total *= tl.exp2((base - new_base) * LOG2E)
    return total


@triton.jit
def softcapped(x, cap):
    """cap * tanh(x / cap) and its derivative, without cancellation for small or large x."""
    z = x / cap
    # tanh is 1 from far below this; infinite powers would break the corrections below.
    size = tl.minimum(tl.abs(z), 100.0, propagate_nan=tl.PropagateNan.ALL)
    q = z * z
    # tanh(z) = z + z * bend, interpolated in z^2 at the Chebyshev nodes of |z| <= 0.6: within 1.1e-8.
    bend = q * (-0.33333330 + q * (0.13332915 + q * (-0.053873949 + q * (0.021110959 + q * -0.0062691197))))
    near = z + z * bend
    # tanh(|z|) = 1 - 2 u
    # Losses multiply the error of a capped logit. So the rounding of the exponent is corrected, and one Newton step
    # refines the fast division.
    power = size * (-2 * LOG2E)
    e = tl.exp2(power)
    e += e * (tl.fma(size, -2 * LOG2E, -power) * LN2)
    d = 1 + e
    r = 1 / d
    u = e * (r + r * (1 - d * r))
    far = cap - 2 * cap * u
    small = size < 0.6
    value = tl.where(small, x + x * bend, tl.where(z < 0, -far, far))
    return value, tl.where(small, 1 - near * near, 4 * u * (1 - u))


@triton.jit
def skew_of(row):
    """Number of elements from the last BOUNDARY before a row to the row."""
    return ((row.to(tl.int64) % BOUNDARY) // (row.dtype.element_ty.primitive_bitwidth // 8)).to(tl.int32)


@triton.jit
def same_alignment(out, skew):
    """Whether the gradient's lanes begin at 16-byte boundaries like those of the logits, which have this skew."""
    return (out - skew).to(tl.int64) % 16 == 0


@triton.jit
def lane_columns(start, LANES: tl.constexpr, VEC: tl.constexpr):
    return start + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def load_lanes(row, start, skew, limit, wanted, LANES: tl.constexpr, VEC: tl.constexpr, POLICY: tl.constexpr):
    """A tile that may extend beyond the row on either side. Lanes are 16-byte aligned and loaded completely: the caller
    masks the elements outside the row."""
    first = start + tl.arange(0, LANES)[:, None] * VEC
    mask = tl.broadcast_to((first < limit) & (first + VEC > skew) & wanted, [LANES, VEC])
    return tl.load(row + lane_columns(start, LANES, VEC), mask=mask, other=float("-inf"), eviction_policy=POLICY)


@triton.jit
def scan_tiles(
    peak, total, tilt, best, row, start, skew, limit, y, reference, weight, softcap, flags,
    LANES: tl.constexpr, TILES: tl.constexpr, EXTRAS: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Adds TILES tiles to the lanes' statistics. WHOLE: all columns are in the row, and none is the true class."""
    VEC: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    TILE: tl.constexpr = LANES * VEC
    raw = ()
    for t in tl.static_range(TILES):
        if WHOLE:
            raw = raw + (tl.load(row + lane_columns(start + t * TILE, LANES, VEC), eviction_policy=POLICY),)
        else:
            raw = raw + (load_lanes(row, start + t * TILE, skew, limit, True, LANES, VEC, POLICY),)

    xs = ()
    new_peak = peak
    for t in tl.static_range(TILES):
        x = raw[t]
        if not WHOLE:
            at = lane_columns(start + t * TILE, LANES, VEC)
            x = tl.where((at >= skew) & (at < limit) & (at != y), x, float("-inf"))
        new_peak = tl.maximum(new_peak, tl.max(x, axis=1).to(tl.float32))
        xs = xs + (x,)
    best = tl.where(new_peak > peak, start, best)

    DTYPE: tl.constexpr = row.dtype.element_ty
    base = peak
    new_base = new_peak
    if EXTRAS:
        if flags & HAS_SOFTCAP:
            base, _ = softcapped(peak, softcap)
            new_base, _ = softcapped(new_peak, softcap)
        total *= tl.exp2((base - new_base) * LOG2E)
    else:
        total = rebased(total, base, new_base, DTYPE)
    for t in tl.static_range(TILES):
        x = xs[t].to(tl.float32)
        if EXTRAS:
            at = lane_columns(start + t * TILE, LANES, VEC)
            inside = (at >= skew) & (at < limit)
            counted = inside & (at != y)
            if flags & HAS_SOFTCAP:
                x, _ = softcapped(x, softcap)
                x = tl.where(counted, x, float("-inf"))
            w = load_weight(weight, at - skew, inside, flags)
            tilt += tl.sum(tl.where(counted, w * (x - reference), 0.0), axis=1)
            total += tl.sum(exp(x - new_base[:, None], DTYPE), axis=1)
        else:
            total += tl.sum(exp_over(x, new_base[:, None], DTYPE), axis=1)
    return new_peak, total, tilt, best


@triton.jit
def scan_kept_tiles(
    peak, total, kept, tile, start, skew, limit, y,
    DTYPE: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """scan_tiles for kept columns, without extras."""
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    new_peak = peak
    xs = ()
    for t in tl.static_range(TILES):
        values = read_kept(kept, tile + t, DTYPE, LANES)
        for i in tl.static_range(VEC):
            x = values[i]
            if not WHOLE:
                at = start + (t * LANES + tl.arange(0, LANES)) * VEC + i
                x = tl.where((at >= skew) & (at < limit) & (at != y), x, float("-inf"))
            new_peak = tl.maximum(new_peak, x)
            xs = xs + (x,)
    total = rebased(total, peak, new_peak, DTYPE)
    for i in tl.static_range(len(xs)):
        total += exp_over(xs[i], new_peak, DTYPE)
    return new_peak, total


@triton.jit
def scan_kept(
    kept, begin, skew, limit, y,
    DTYPE: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """(largest logit, sum of exponentials relative to it) of each lane in the KEPT columns from `begin` on."""
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    SPAN: tl.constexpr = LANES * VEC * TILES
    peak = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for tile in range(0, KEPT // (LANES * VEC), TILES):
        start = begin + tile * (LANES * VEC)
        if (start >= skew) & (start + SPAN <= limit) & ((y < start) | (y >= start + SPAN)):
            peak, total = scan_kept_tiles(peak, total, kept, tile, start, skew, limit, y, DTYPE, LANES, TILES, True)
        elif start < limit:
            peak, total = scan_kept_tiles(peak, total, kept, tile, start, skew, limit, y, DTYPE, LANES, TILES, False)
    return peak, total


@triton.jit
def first_kept(kept, highest, begin, skew, limit, y, DTYPE: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr):
    """The first kept column of each lane that has the value `highest`, or NOWHERE."""
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    first = tl.full([LANES], NOWHERE, tl.int32)
    for tile in range(KEPT // (LANES * VEC)):
        values = read_kept(kept, tile, DTYPE, LANES)
        for i in tl.static_range(VEC):
            at = begin + (tile * LANES + tl.arange(0, LANES)) * VEC + i
            found = (values[i] == highest) & (at >= skew) & (at < limit) & (at != y)
            first = tl.minimum(first, tl.where(found, at, NOWHERE))
    return first


@triton.jit
def combine(peak, total, tilt, first, softcap, flags, EXTRAS: tl.constexpr):
    """Combines statistics of sets of columns: (largest logit, the same softcapped, sum, tilt, its column)."""
    base = peak
    highest = tl.max(peak, axis=0)
    top = highest
    if EXTRAS:
        if flags & HAS_SOFTCAP:
            base, _ = softcapped(peak, softcap)
            top, _ = softcapped(highest, softcap)
    total = tl.sum(total * tl.exp2((base - top) * LOG2E), axis=0)
    return highest, top, total, tl.sum(tilt, axis=0), tl.min(tl.where(peak == highest, first, NOWHERE), axis=0)


@triton.jit
def start_order(started):
    """The number of programs that started before this one. Where programs wait for each other, it stands for the
    program's index: a program then waits only for programs of earlier rows and its own, and a GPU that has room for one
    row's programs always gets on, in whatever order it starts them."""
    return tl.atomic_add(started, 1, sem="relaxed")


@triton.jit
def combine_parts(shares, arrived, peak, total, tilt, first, own, parts, softcap, flags, EXTRAS: tl.constexpr):
    """Stores the statistics of part `own` in `shares`, waits for the row's other parts, and combines all in a fixed order."""
    mine = shares + own * 4
    tl.store(mine, peak)
    tl.store(mine + 1, total)
    tl.store(mine + 2, tilt)
    tl.store(mine + 3, first.to(tl.float32, bitcast=True))
    tl.atomic_add(arrived, 1, sem="release")
    # atomic_add of 0 is a load with acquire semantics.
    while tl.atomic_add(arrived, 0, sem="acquire") < parts:
        pass
    part = tl.arange(0, MOST_PARTS)
    there = part < parts
    at = shares + part * 4
    # Volatile, because another multiprocessor wrote this.
    peak = tl.load(at, mask=there, other=LOWEST, volatile=True)
    total = tl.load(at + 1, mask=there, other=0.0, volatile=True)
    tilt = tl.load(at + 2, mask=there, other=0.0, volatile=True)
    first = tl.load(at + 3, mask=there, other=0.0, volatile=True).to(tl.int32, bitcast=True)
    return combine(peak, total, tilt, tl.where(there, first, NOWHERE), softcap, flags, EXTRAS)


@triton.jit
def scan_row(
    row, kept, begin, end, n, y, x_y, true, reference, weight, softcap, flags, shares, arrived, own, parts,
    LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, PART: tl.constexpr, EXTRAS: tl.constexpr,
    KEPT: tl.constexpr, REST: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Reads a row once, or one of its `parts`, the columns begin..end:
    (top, total, others, nll, tilt, highest, predicted).

    `kept` holds the first KEPT columns; REST: there may be more.

    x_y: the true class's logit, true: the same softcapped
    top: largest x, total: sum_j exp(x_j - top), others: the same for j != y, nll: lse - x_y,
    tilt: sum_j w_j * (x_j - reference) for j != y, highest: largest logit
    """
    DTYPE: tl.constexpr = row.dtype.element_ty
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    skew = 0
    if SKEWED:
        skew = skew_of(row)
        row = tl.multiple_of(row - skew, 16)
    limit = n + skew
    y = (y + skew).to(tl.int32)
    tilt = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    if KEPT:
        kept = await_kept(kept)
        peak, lane_total = scan_kept(kept, begin, skew, limit, y, DTYPE, KEPT, LANES, TILES)
    else:
        peak = tl.full([LANES], LOWEST, tl.float32)
        lane_total = tl.zeros([LANES], tl.float32)
    # Extras need more registers, and their arithmetic hides the loads.
    GROUP: tl.constexpr = 1 if EXTRAS else TILES
    SPAN: tl.constexpr = GROUP * LANES * VEC
    if REST:
        for start in range(begin + KEPT, end if PART else limit, SPAN):
            whole = (start >= skew) & (start + SPAN <= limit) & ((y < start) | (y >= start + SPAN))
            if EXTRAS or not whole:
                peak, lane_total, tilt, best = scan_tiles(
                    peak, lane_total, tilt, best, row, start, skew, limit, y, reference, weight, softcap, flags,
                    LANES, GROUP, EXTRAS, False, POLICY,
                )  # fmt: skip
            else:
                peak, lane_total, tilt, best = scan_tiles(
                    peak, lane_total, tilt, best, row, start, skew, limit, y, reference, weight, softcap, flags,
                    LANES, GROUP, EXTRAS, True, POLICY,
                )  # fmt: skip
    if not EXTRAS:
        lane_total *= base_correction(peak, DTYPE)

    first = tl.full([LANES], NOWHERE, tl.int32)
    if flags & SAVE_METRICS:
        raw_others = tl.max(peak, axis=0)
        if KEPT:
            first = first_kept(kept, raw_others, begin, skew, limit, y, DTYPE, KEPT, LANES)
        if REST:
            # Only lanes that hold the maximum read again, and only the tiles where they first found it.
            wanted = ((peak == raw_others) & (best >= begin + KEPT))[:, None]
            for t in tl.static_range(GROUP):
                tile = best[:, None] + t * LANES * VEC
                at = lane_columns(tile, LANES, VEC)
                x = load_lanes(row, tile, skew, limit, wanted, LANES, VEC, "").to(tl.float32)
                found = wanted & (x == raw_others) & (at >= skew) & (at < limit) & (at != y)
                first = tl.minimum(first, tl.min(tl.where(found, at, NOWHERE), axis=1))
    raw_others, top_others, others, tilt, first = combine(peak, lane_total, tilt, first, softcap, flags, EXTRAS)
    if PART:
        raw_others, top_others, others, tilt, first = combine_parts(
            shares, arrived, raw_others, others, tilt, first, own, parts, softcap, flags, EXTRAS
        )

    top = tl.maximum(true, top_others)
    others *= exp(top_others - top, row.dtype.element_ty)
    total = exp(true - top, row.dtype.element_ty) + others
    nll = top - true + tl.where(true >= top_others, log1p(others), tl.log(total))
    predicted = tl.where((x_y > raw_others) | ((x_y == raw_others) & (y < first)), y, first)
    # A row that contains only -inf or NaN.
    predicted = tl.where(predicted == NOWHERE, 0, predicted - skew)
    return top, total, others, nll, tilt, tl.maximum(x_y, raw_others), predicted


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
            # Distances from x_y rather than from 0, so that a common offset of the logits costs no digits.
            level = tl.where(reference == x_y, nll, lse - reference)
            away = tl.where(reference == x_y, 0.0, x_y - reference)
            smooth = level * weight_sum - tilt - w_y * away
            loss = (1 - label_smoothing) * loss + label_smoothing / n * smooth
    return loss, z_loss


@triton.jit
def store_row(loss, z_loss, accuracy, predicted, row, row_loss, row_z_loss, row_predicted, y, leads, flags):
    """Stores the results of a row. Only the row's leading program stores."""
    add = tl.where((flags & ADD_Z_LOSS) != 0, row_z_loss, 0.0)
    tl.store(loss + row, row_loss + add, mask=leads)
    tl.store(z_loss + row, row_z_loss, mask=leads & ((flags & SAVE_Z_LOSS) != 0))
    metrics = leads & ((flags & SAVE_METRICS) != 0)
    tl.store(accuracy + row, tl.where((row_predicted >= 0) & (row_predicted == y), 1.0, 0.0), mask=metrics)
    tl.store(predicted + row, row_predicted.to(tl.int64), mask=metrics)


@triton.jit
def store_facts(facts, row, rows, top, others, true, tilt, highest, predicted, leads, flags):
    """Stores what the other processes must know about this process's classes in one row, as (facts, rows):
    top, others, the true class's x or -inf, then tilt with HAS_SMOOTHING, then highest and predicted with SAVE_METRICS."""
    at = facts + row
    rows = rows.to(tl.int64)
    tl.store(at, top, mask=leads)
    tl.store(at + rows, others, mask=leads)
    tl.store(at + rows * 2, true, mask=leads)
    at += rows * 3
    if flags & HAS_SMOOTHING:
        tl.store(at, tilt, mask=leads)
        at += rows
    if flags & SAVE_METRICS:
        tl.store(at, highest, mask=leads)
        tl.store(at + rows, predicted.to(tl.float32, bitcast=True), mask=leads)


@triton.jit
def forward_row(
    loss, z_loss, accuracy, predicted, facts, row, rows, x_row, kept, begin, end, y, first_class, weight, weight_sum,
    n, label_smoothing, lse_square_scale, softcap, flags, shares, arrived, own, parts,
    LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, PART: tl.constexpr, EXTRAS: tl.constexpr,
    KEPT: tl.constexpr, REST: tl.constexpr, POLICY: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Stores losses and metrics of one row with a target, or its facts. Returns (top, total, miss) for its gradient.

    y: the class as a column of the row; first_class: the class of the first column. SPLIT: the flag LOCAL may be set.
    """
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
    if SPLIT:
        # If it is not a column here, another process has the true class.
        here = valid | ((flags & LOCAL) == 0)
        x_y = tl.where(here, x_y, float("-inf"))
        true = tl.where(here, true, float("-inf"))
    reference = tl.where(true == float("-inf"), 0.0, true)
    if EXTRAS and SPLIT:
        if flags & LOCAL:
            # Any logit near the others keeps the digits of their sum.
            nearby = tl.load(x_row).to(tl.float32)
            if flags & HAS_SOFTCAP:
                nearby, _ = softcapped(nearby, softcap)
            nearby = tl.where(tl.abs(nearby) < float("inf"), nearby, 0.0)
            reference = tl.where(valid, reference, nearby)
    # An invalid y matches no column.
    top, total, others, nll, tilt, highest, best = scan_row(
        x_row, kept, begin, end, n, tl.where(valid, y, -64), x_y, true, reference, weight, softcap, flags, shares, arrived,
        own, parts, LANES, TILES, SKEWED, PART, EXTRAS, KEPT, REST, POLICY,
    )  # fmt: skip
    leads = begin == 0
    if SPLIT:
        if EXTRAS:
            # Of all columns, with distances from `top`.
            all_tilt = tilt + (sum_w - tl.where(valid, w_y, 0.0)) * (reference - top)
            all_tilt += tl.where(valid, w_y * (true - top), 0.0)
        else:
            all_tilt = tilt
        local = (flags & LOCAL) != 0
        if local:
            store_facts(facts, row, rows, top, others, true, all_tilt, highest, best + first_class, leads, flags)
        leads = leads & (local == 0)
    row_loss, row_z_loss = row_losses(
        top, total, nll, tilt, true, reference, w_y, sum_w, n, label_smoothing, lse_square_scale, flags, EXTRAS
    )
    store_row(loss, z_loss, accuracy, predicted, row, row_loss, row_z_loss, best, y, leads, flags)
    return top, total, tl.div_rn(others, total)
