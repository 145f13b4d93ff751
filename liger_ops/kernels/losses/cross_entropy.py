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
may write over what they read. fwd_bwd does both, row by row: it keeps the first KEPT columns, see kept.py, and finds
the others in the L2 cache when it reads them again.

Rows that are longer than a program can keep are shared out, PART columns a program. So are SHARED ones in forward,
without extras, which are too few to occupy the device. The programs of a row meet after its first read, which asks that
all of them run at a time: the host shares out no row among more programs than the device has multiprocessors.

SKEWED = 1 takes rows of any length that begin anywhere, as those of an odd vocabulary do. Columns are then counted
from the last 128-byte boundary at or before the row, `skew` columns to its left: all whole tiles are as fast as those
of aligned rows.

A row whose target is ignore_index is not read: loss and gradient are 0, the predicted class is -1. A target out of
range reads nothing out of bounds: its row's loss and gradient are NaN. Targets are int32 words, two for an int64.
`totals` are the divisors of a mean, (sum of w_y, number of targets); they never leave the device.
"""

import triton
import triton.language as tl

from ..kept import await_kept, keep, lane_words, read_kept, write_lanes, write_some_lanes
from ..rows import LOG2E, prefetch, programs_ahead, row_offset
from ..table import FLOATS, HALVES, Config, Kernel

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
HAS_TOTALS = tl.constexpr(8192)

# A column that no row has.
NOWHERE = tl.constexpr(0x7FFFFFFF)
MOST_PARTS = tl.constexpr(128)
BOUNDARY = tl.constexpr(128)  # in bytes: what a warp writes from one on is whole cache lines
MOST_SKEW = tl.constexpr(BOUNDARY.value // 2 - 1)
LOG2E_TAIL = tl.constexpr(1.925963033500011e-08)  # of LOG2E, beyond fp32
LN2 = tl.constexpr(0.6931471805599453)
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
def exp(x, dtype: tl.constexpr):
    """For x <= 0. Of fp32 logits it keeps what rounding drops of the exponent, which 16-bit ones would not show."""
    if dtype.primitive_bitwidth < 32:
        return tl.exp2(x * LOG2E)
    # 0 from here on, and no -inf - -inf.
    x = tl.maximum(x, -1000.0, propagate_nan=tl.PropagateNan.ALL)
    power = x * LOG2E
    e = tl.exp2(power)
    return e + e * ((tl.fma(x, LOG2E, -power) + x * LOG2E_TAIL) * LN2)


@triton.jit
def exponent(x):
    """x in powers of 2; finite for LOWEST."""
    return tl.maximum(x * LOG2E, LOWEST)


@triton.jit
def exp_over(x, base, dtype: tl.constexpr):
    """exp(x - base) for x <= base. Of 16-bit logits in one multiply-add, and relative to 2 ** exponent(base) instead:
    rounded_off(base) is the factor between them."""
    if dtype.primitive_bitwidth < 32:
        e = tl.exp2(tl.fma(x, LOG2E, -exponent(base)))
    else:
        e = exp(x - base, dtype)
    return e


@triton.jit
def rounded_off(base, dtype: tl.constexpr):
    factor = tl.full(base.shape, 1.0, tl.float32)
    if dtype.primitive_bitwidth < 32:
        factor = tl.exp2(tl.where(base == LOWEST, 0.0, -tl.fma(base, LOG2E, -exponent(base))))
    return factor


@triton.jit
def rebased(total, base, new_base, dtype: tl.constexpr):
    """A sum of exp_over(x, base) as one of exp_over(x, new_base)."""
    if dtype.primitive_bitwidth < 32:
        total *= tl.exp2(exponent(base) - exponent(new_base))
    else:
        total *= tl.exp2((base - new_base) * LOG2E)
    return total


@triton.jit
def softcapped(x, cap):
    """cap * tanh(x / cap) and its slope, without cancellation at either end."""
    z = x / cap
    # tanh is 1 long before; infinite powers would spoil the corrections below.
    size = tl.minimum(tl.abs(z), 100.0, propagate_nan=tl.PropagateNan.ALL)
    q = z * z
    # tanh(z) = z + z * bend, interpolated in z^2 at the Chebyshev nodes of |z| <= 0.6: within 1.1e-8.
    bend = q * (-0.33333330 + q * (0.13332915 + q * (-0.053873949 + q * (0.021110959 + q * -0.0062691197))))
    near = z + z * bend
    # tanh(|z|) = 1 - 2 u
    # Losses multiply the error of a capped logit. So the exponent keeps what its rounding drops, and a step of Newton's
    # mends the fast division.
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
def log1p(x):
    """For x > -1. Dividing by what 1 + x became undoes the rounding of the addition."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def skew_of(row):
    """Elements between the last boundary and a row."""
    return ((row.to(tl.int64) % BOUNDARY) // (row.dtype.element_ty.primitive_bitwidth // 8)).to(tl.int32)


@triton.jit
def is_level(out, skew):
    """Whether a gradient's lanes begin at 16-byte boundaries where its logits' do, which have this skew."""
    return (out - skew).to(tl.int64) % 16 == 0


@triton.jit
def lane_columns(start, LANES: tl.constexpr, VEC: tl.constexpr):
    return start + tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]


@triton.jit
def load_lanes(row, start, skew, limit, wanted, LANES: tl.constexpr, VEC: tl.constexpr, POLICY: tl.constexpr):
    """A tile that a row may leave on either side. Lanes are loaded whole, for none straddles a 16-byte boundary:
    what is not of the row is for the caller to drop."""
    first = start + tl.arange(0, LANES)[:, None] * VEC
    mask = tl.broadcast_to((first < limit) & (first + VEC > skew) & wanted, [LANES, VEC])
    return tl.load(row + lane_columns(start, LANES, VEC), mask=mask, other=float("-inf"), eviction_policy=POLICY)


@triton.jit
def scan_tiles(
    peak, total, tilt, best, row, start, skew, limit, y, reference, weight, softcap, flags,
    LANES: tl.constexpr, TILES: tl.constexpr, EXTRAS: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Takes TILES tiles into the lanes' statistics. WHOLE: all within the row, the true class not among them."""
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
    """scan_tiles of what is kept, without extras."""
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
    """Where each lane has the value `highest` among what is kept, if anywhere."""
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
def unite(peak, total, tilt, first, softcap, flags, EXTRAS: tl.constexpr):
    """Statistics of several sets of columns -> of all: (largest logit, the same capped, sum, tilt, where it is)."""
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
def meet(shares, arrived, peak, total, tilt, first, parts, softcap, flags, EXTRAS: tl.constexpr):
    """Leaves this part's statistics in `shares`, waits for the row's other parts', and unites them in their order."""
    mine = shares + (tl.program_id(0) % parts) * 4
    tl.store(mine, peak)
    tl.store(mine + 1, total)
    tl.store(mine + 2, tilt)
    tl.store(mine + 3, first.to(tl.float32, bitcast=True))
    tl.atomic_add(arrived, 1, sem="release")
    # Adding nothing is how to load with acquire semantics.
    while tl.atomic_add(arrived, 0, sem="acquire") < parts:
        pass
    part = tl.arange(0, MOST_PARTS)
    there = part < parts
    at = shares + part * 4
    # Volatile: another multiprocessor wrote this since.
    peak = tl.load(at, mask=there, other=LOWEST, volatile=True)
    total = tl.load(at + 1, mask=there, other=0.0, volatile=True)
    tilt = tl.load(at + 2, mask=there, other=0.0, volatile=True)
    first = tl.load(at + 3, mask=there, other=0.0, volatile=True).to(tl.int32, bitcast=True)
    return unite(peak, total, tilt, tl.where(there, first, NOWHERE), softcap, flags, EXTRAS)


@triton.jit
def scan_row(
    row, kept, begin, end, n, y, x_y, reference, weight, softcap, flags, shares, arrived, parts,
    LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, PART: tl.constexpr, EXTRAS: tl.constexpr,
    KEPT: tl.constexpr, REST: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """One read of a row, or of the columns begin..end by one of its `parts`: (top, total, miss, nll, tilt, predicted).

    `kept` has the first KEPT of the columns; REST: there may be more.

    top: largest x, total: sum_j exp(x_j - top), miss: 1 - p_y, nll: lse - x_y,
    tilt: sum_j w_j * (x_j - reference) for j != y
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
    # Extras need registers, and so much arithmetic that loads hide behind it.
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
        lane_total *= rounded_off(peak, DTYPE)

    first = tl.full([LANES], NOWHERE, tl.int32)
    if flags & SAVE_METRICS:
        raw_others = tl.max(peak, axis=0)
        if KEPT:
            first = first_kept(kept, raw_others, begin, skew, limit, y, DTYPE, KEPT, LANES)
        if REST:
            # Only lanes that hold the maximum look again, at the tiles where they first met it.
            wanted = ((peak == raw_others) & (best >= begin + KEPT))[:, None]
            for t in tl.static_range(GROUP):
                tile = best[:, None] + t * LANES * VEC
                at = lane_columns(tile, LANES, VEC)
                x = load_lanes(row, tile, skew, limit, wanted, LANES, VEC, "").to(tl.float32)
                found = wanted & (x == raw_others) & (at >= skew) & (at < limit) & (at != y)
                first = tl.minimum(first, tl.min(tl.where(found, at, NOWHERE), axis=1))
    raw_others, top_others, others, tilt, first = unite(peak, lane_total, tilt, first, softcap, flags, EXTRAS)
    if PART:
        raw_others, top_others, others, tilt, first = meet(
            shares, arrived, raw_others, others, tilt, first, parts, softcap, flags, EXTRAS
        )

    true = x_y
    if EXTRAS:
        if flags & HAS_SOFTCAP:
            true, _ = softcapped(x_y, softcap)
    top = tl.maximum(true, top_others)
    others *= exp(top_others - top, row.dtype.element_ty)
    total = exp(true - top, row.dtype.element_ty) + others
    nll = top - true + tl.where(true >= top_others, log1p(others), tl.log(total))
    predicted = tl.where((x_y > raw_others) | ((x_y == raw_others) & (y < first)), y, first)
    # A row of -inf or NaN alone.
    predicted = tl.where(predicted == NOWHERE, 0, predicted - skew)
    return top, total, tl.div_rn(others, total), nll, tilt, predicted


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
def store_row(loss, z_loss, accuracy, predicted, row, row_loss, row_z_loss, row_predicted, y, leads, flags):
    """For the one of the row's programs that leads."""
    add = tl.where((flags & ADD_Z_LOSS) != 0, row_z_loss, 0.0)
    tl.store(loss + row, row_loss + add, mask=leads)
    tl.store(z_loss + row, row_z_loss, mask=leads & ((flags & SAVE_Z_LOSS) != 0))
    metrics = leads & ((flags & SAVE_METRICS) != 0)
    tl.store(accuracy + row, tl.where((row_predicted >= 0) & (row_predicted == y), 1.0, 0.0), mask=metrics)
    tl.store(predicted + row, row_predicted.to(tl.int64), mask=metrics)


@triton.jit
def forward_row(
    loss, z_loss, accuracy, predicted, row, x_row, kept, begin, end, y, weight, weight_sum,
    n, label_smoothing, lse_square_scale, softcap, flags, shares, arrived, parts,
    LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, PART: tl.constexpr, EXTRAS: tl.constexpr,
    KEPT: tl.constexpr, REST: tl.constexpr, POLICY: tl.constexpr,
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
        x_row, kept, begin, end, n, tl.where(valid, y, -64), x_y, reference, weight, softcap, flags, shares, arrived,
        parts, LANES, TILES, SKEWED, PART, EXTRAS, KEPT, REST, POLICY,
    )  # fmt: skip
    row_loss, row_z_loss = row_losses(
        top, total, nll, tilt, true, reference, w_y, sum_w, n, label_smoothing, lse_square_scale, flags, EXTRAS
    )
    store_row(loss, z_loss, accuracy, predicted, row, row_loss, row_z_loss, best, y, begin == 0, flags)
    return top, total, miss


@triton.jit
def cross_entropy_fwd_kernel(
    loss, z_loss, accuracy, predicted, stats, logits, target, weight, weight_sum, shares, arrived,
    rows, n, part, inner_rows, logits_outer, logits_inner, target_words, ignore_index,
    label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, SHARED: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr,
):  # fmt: skip
    """SHARED: rows are so few that they are shared out, `part` columns a program."""
    parts = 1
    row = tl.program_id(0)
    begin = 0
    end = n
    if SHARED:
        parts = tl.cdiv(columns_end(n, SKEWED), part)
        row = tl.program_id(0) // parts
        begin = tl.multiple_of((tl.program_id(0) - row * parts) * part, 8)
        end = tl.minimum(columns_end(n, SKEWED), begin + part)
    y = load_target(target, row, target_words, True)
    if y == ignore_index:
        store_row(loss, z_loss, accuracy, predicted, row, 0.0, 0.0, tl.full([], -1, tl.int32), y, begin == 0, flags)
    else:
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        top, total, miss = forward_row(
            loss, z_loss, accuracy, predicted, row, x_row, 0, begin, end, y, weight, weight_sum, n,
            label_smoothing, lse_square_scale, softcap, flags, shares + row * (parts * 4), arrived + row, parts,
            LANES, TILES, SKEWED, SHARED, EXTRAS, 0, True, "",
        )  # fmt: skip
        save = (begin == 0) & ((flags & SAVE_STATS) != 0)
        tl.store(stats + row, top, mask=save)
        tl.store(stats + rows.to(tl.int64) + row, total, mask=save)
        tl.store(stats + rows.to(tl.int64) * 2 + row, miss, mask=save)


@triton.jit
def write_gradient(
    out, x_row, cols, mask, skew, y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags,
    EXTRAS: tl.constexpr, WHOLE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        x = tl.load(x_row + cols, eviction_policy=POLICY).to(tl.float32)
    else:
        x = tl.load(x_row + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if EXTRAS:
        chain = tl.full(x.shape, 1.0, tl.float32)
        if flags & HAS_SOFTCAP:
            x, chain = softcapped(x, softcap)
        e = exp(x - top, out.dtype.element_ty)
        drop = tl.where(cols == y, drop_y, 0.0) + tilt * load_weight(weight, cols - skew, mask, flags)
        dx = (e * tl.where(cols == y, slope_y, slope) - drop) * chain
    else:
        dx = exp_over(x, top, out.dtype.element_ty) * slope
    dx = dx.to(out.dtype.element_ty)
    if WHOLE:
        tl.store(out + cols, dx, eviction_policy=POLICY)
    else:
        tl.store(out + cols, dx, mask=mask, eviction_policy=POLICY)


@triton.jit
def arriving(grad, totals, row, stride, flags, known):
    """What arrives for a row's loss, and for its z-loss, which has another divisor in a mean."""
    grad = tl.load(grad + row.to(tl.int64) * stride, mask=known, other=1.0)
    mean = (flags & MEAN) != 0
    by_weight = tl.load(totals, mask=mean, other=1.0)
    by_count = tl.load(totals + 1, mask=mean, other=1.0)
    # What a whole row is multiplied by is rounded once: a fast division is off by up to 2 ulp.
    return tl.where(mean, tl.div_rn(grad, by_weight), grad), tl.where(mean, tl.div_rn(grad, by_count), grad)


@triton.jit
def gradient_terms(
    n, y, top, total, miss, grad, grad_z, weight, weight_sum, label_smoothing, lse_square_scale, flags,
    EXTRAS: tl.constexpr,
):  # fmt: skip
    """(slope, slope_y, drop_y, tilt): d loss / d x_k = exp(x_k - top) * slope - tilt * w_k, for the true class with
    slope_y and less drop_y."""
    # With p = exp(x - top) / total:
    # d loss / d x_k = p_k * (pull + spill) - tilt * w_k, and for the true class
    #                  p_y * spill - (1 - p_y) * pull - tilt * w_y
    pull = grad
    spill = grad_z * 2 * lse_square_scale * (top + tl.log(total))
    tilt = 0.0
    if EXTRAS:
        w_y = load_weight(weight, y, (y >= 0) & (y < n), flags)
        pull = grad * w_y
        if flags & HAS_SMOOTHING:
            pull *= 1 - label_smoothing
            tilt = grad * label_smoothing / n
            mean_weight = tl.load(weight_sum, mask=(flags & HAS_WEIGHT) != 0, other=n.to(tl.float32)) / n
            spill += grad * label_smoothing * mean_weight
    return tl.div_rn(pull + spill, total), tl.div_rn(spill, total), pull * miss, tilt


@triton.jit
def gradient_span(
    out, x_row, begin, end, n, y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags,
    BLOCK_N: tl.constexpr, SKEWED: tl.constexpr, EXTRAS: tl.constexpr, BACKWARDS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """Gradient of the columns begin..end of one row; without extras the true class is left to write_true."""
    skew = 0
    level = True
    if SKEWED:
        skew = skew_of(x_row)
        # Otherwise a row goes element by element.
        level = is_level(out, skew)
    y = (y + skew).to(tl.int32)
    limit = n + skew
    BLOCK: tl.constexpr = BLOCK_N // 4 if EXTRAS else BLOCK_N
    for block in range(0, end - begin, BLOCK):
        # What was read last is likeliest in the cache still.
        start = begin + ((end - begin - 1) // BLOCK * BLOCK - block if BACKWARDS else block)
        cols = start + tl.arange(0, BLOCK)
        mask = cols < limit
        if SKEWED:
            mask &= cols >= skew
        if SKEWED and (level & (start >= skew) & (start + BLOCK <= limit)):
            write_gradient(
                tl.multiple_of(out - skew, 16), tl.multiple_of(x_row - skew, 16), cols, mask, skew,
                y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags, EXTRAS, True, POLICY,
            )  # fmt: skip
        else:
            write_gradient(
                out - skew, x_row - skew, cols, mask, skew,
                y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags, EXTRAS, False, POLICY,
            )  # fmt: skip


@triton.jit
def gradient_kept(
    out, kept, begin, n, skew, top, slope,
    DTYPE: tl.constexpr, KEPT: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr,
):  # fmt: skip
    """gradient_span of the KEPT columns from `begin` on, without extras. skew: of the logits."""
    VEC: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    limit = n + skew
    level = True
    if SKEWED:
        level = is_level(out, skew)
    for tile in range(0, KEPT // (LANES * VEC), TILES):
        start = begin + tile * (LANES * VEC)
        whole = level & (start >= skew) & (start + TILES * LANES * VEC <= limit)
        for t in tl.static_range(TILES):
            first = start + (t * LANES + tl.arange(0, LANES)) * VEC
            values = read_kept(kept, tile + t, DTYPE, LANES)
            dx = ()
            for i in tl.static_range(VEC):
                dx = dx + (exp_over(values[i], top, DTYPE) * slope,)
            if whole:
                write_lanes(out - skew + first, lane_words(dx, DTYPE))
            elif start < limit:
                # Of a row's first and last tile all lanes but one are as good as others.
                lanes = level & (first >= skew) & (first + VEC <= limit)
                write_some_lanes(out - skew + first, lane_words(dx, DTYPE), lanes)
                for i in tl.static_range(VEC):
                    at = first + i
                    tl.store(out - skew + at, dx[i].to(DTYPE), mask=(at >= skew) & (at < limit) & (lanes == 0))


@triton.jit
def write_true(out, begin, end, n, skew, y, x_y, top, slope_y, drop_y):
    """The one column of begin..end that is unlike the others, over what this program wrote there. x_y: its logit, read
    before any was written."""
    tl.debug_barrier()
    at_y = exp(x_y - top, out.dtype.element_ty) * slope_y - drop_y
    mine = (y >= 0) & (y < n) & (y + skew >= begin) & (y + skew < end)
    tl.store(out + y, at_y.to(out.dtype.element_ty), mask=mine)


@triton.jit
def zero_span(out, begin, end, n, BLOCK_N: tl.constexpr, SKEWED: tl.constexpr):
    zeros = tl.zeros([BLOCK_N], out.dtype.element_ty)
    skew = 0
    if SKEWED:
        skew = skew_of(out)
        out = tl.multiple_of(out - skew, 16)
    for start in range(begin, end, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        if SKEWED:
            if (start >= skew) & (start + BLOCK_N <= n + skew):
                tl.store(out + cols, zeros)
            else:
                tl.store(out + cols, zeros, mask=(cols >= skew) & (cols < n + skew))
        else:
            tl.store(out + cols, zeros, mask=cols < n)


@triton.jit
def columns_end(n, SKEWED: tl.constexpr):
    """Where a row of n columns ends at the latest, whatever its skew."""
    return n + MOST_SKEW if SKEWED else n


@triton.jit
def cross_entropy_bwd_kernel(
    dlogits, logits, target, stats, grad, totals, weight, weight_sum,
    rows, n, inner_rows, dlogits_outer, dlogits_inner, logits_outer, logits_inner, target_words, grad_stride,
    ignore_index, label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, SKEWED: tl.constexpr,
):  # fmt: skip
    spans = tl.cdiv(columns_end(n, SKEWED), BLOCK_N * BLOCKS)
    row = tl.program_id(0) // spans
    begin = (tl.program_id(0) - row * spans) * (BLOCK_N * BLOCKS)
    end = tl.minimum(columns_end(n, SKEWED), begin + BLOCK_N * BLOCKS)
    out = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
    y = load_target(target, row, target_words, True)
    if y == ignore_index:
        zero_span(out, begin, end, n, BLOCK_N, SKEWED)
    else:
        grad_here, grad_z = arriving(grad, totals, row, grad_stride, flags, True)
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        x_y = tl.load(x_row + y, mask=(y >= 0) & (y < n), other=0.0).to(tl.float32)
        top = tl.load(stats + row)
        total = tl.load(stats + rows.to(tl.int64) + row)
        miss = tl.load(stats + rows.to(tl.int64) * 2 + row)
        slope, slope_y, drop_y, tilt = gradient_terms(
            n, y, top, total, miss, grad_here, grad_z, weight, weight_sum, label_smoothing, lse_square_scale, flags,
            EXTRAS,
        )  # fmt: skip
        # The logits may be what this writes over.
        tl.debug_barrier()
        gradient_span(
            out, x_row, begin, end, n, y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags,
            BLOCK_N, SKEWED, EXTRAS, False, "",
        )  # fmt: skip
        if not EXTRAS:
            skew = 0
            if SKEWED:
                skew = skew_of(x_row)
            write_true(out, begin, end, n, skew, y, x_y, top, slope_y, drop_y)


@triton.jit
def cross_entropy_fwd_bwd_kernel(
    loss, z_loss, accuracy, predicted, dlogits, logits, target, grad, totals, weight, weight_sum, shares, arrived,
    rows, n, inner_rows, dlogits_outer, dlogits_inner, logits_outer, logits_inner, target_words, grad_stride,
    ignore_index, label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, BLOCK_N: tl.constexpr,
    SHARE: tl.constexpr, KEEP: tl.constexpr, KEEPS_ALL: tl.constexpr,
):  # fmt: skip
    """SHARE, KEEP: PART and KEPT in 16-bit logits; one of 32 bits counts twice."""
    PART: tl.constexpr = SHARE * 16 // logits.dtype.element_ty.primitive_bitwidth
    KEPT: tl.constexpr = 0 if EXTRAS else KEEP * 16 // logits.dtype.element_ty.primitive_bitwidth
    REST: tl.constexpr = EXTRAS or not KEEPS_ALL
    ASKS_AHEAD: tl.constexpr = not REST
    parts = 1
    row = tl.program_id(0)
    begin = 0
    end = columns_end(n, SKEWED)
    if PART:
        parts = tl.cdiv(end, PART)
        row = tl.program_id(0) // parts
        begin = (tl.program_id(0) - row * parts) * PART
        end = tl.minimum(end, begin + PART)
    out = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
    y = load_target(target, row, target_words, True)
    if ASKS_AHEAD:
        later = tl.program_id(0) + programs_ahead(2 * KEEP)
        first = 0
        if PART:
            first = later % parts * PART
            later //= parts
        later_y = load_target(target, later, target_words, later < rows)
    if y == ignore_index:
        store_row(loss, z_loss, accuracy, predicted, row, 0.0, 0.0, tl.full([], -1, tl.int32), y, begin == 0, flags)
        zero_span(out, begin, end, n, BLOCK_N, SKEWED)
    else:
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        # Asked for before the rows' programs wait for each other.
        grad_here, grad_z = arriving(grad, totals, row, grad_stride, flags, (flags & HAS_GRAD) != 0)
        x_y = tl.load(x_row + y, mask=(y >= 0) & (y < n), other=0.0).to(tl.float32)
        skew = 0
        if SKEWED:
            skew = skew_of(x_row)
        kept = 0
        if KEPT:
            kept = keep(tl.multiple_of(x_row - skew, 16), begin, skew, n + skew, KEPT, LANES)
        if ASKS_AHEAD:
            wanted = (later < rows) & (later_y != ignore_index)
            last = tl.where(wanted, tl.minimum(first + KEPT, n), first)
            prefetch(logits + row_offset(later, inner_rows, logits_outer, logits_inner), first, last)
        # Long rows stay in the cache by being few; a hint to keep them there only drives out others.
        FIRST_READ: tl.constexpr = "" if PART else "evict_last"
        top, total, miss = forward_row(
            loss, z_loss, accuracy, predicted, row, x_row, kept, begin, end, y, weight, weight_sum,
            n, label_smoothing, lse_square_scale, softcap, flags, shares + row.to(tl.int64) * (parts * 4),
            arrived + row, parts, LANES, TILES, SKEWED, PART, EXTRAS, KEPT, REST, FIRST_READ,
        )  # fmt: skip
        slope, slope_y, drop_y, tilt = gradient_terms(
            n, y, top, total, miss, grad_here, grad_z, weight, weight_sum, label_smoothing, lse_square_scale, flags,
            EXTRAS,
        )  # fmt: skip
        # No thread may write over a logit that another has yet to read.
        tl.debug_barrier()
        if REST:
            gradient_span(
                out, x_row, begin + KEPT, end, n, y, top, slope, slope_y, drop_y, tilt, weight, softcap, flags,
                BLOCK_N, SKEWED, EXTRAS, True, "evict_first",
            )  # fmt: skip
        if KEPT:
            gradient_kept(out, kept, begin, n, skew, top, slope, logits.dtype.element_ty, KEPT, LANES, TILES, SKEWED)
        if not EXTRAS:
            write_true(out, begin, end, n, skew, y, x_y, top, slope_y, drop_y)


@triton.jit
def cross_entropy_describe_kernel(
    log_prob, entropy, logits, target, stats, rows, n, stride, target_words, ignore_index, softcap, flags,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of every row with a target: log p_y, and the entropy of its distribution. A row without one: zeros."""
    row = tl.program_id(0)
    y = load_target(target, row, target_words, True)
    counted = y != ignore_index
    x_row = logits + row.to(tl.int64) * stride
    top = tl.load(stats + row, mask=counted, other=0.0)
    total = tl.load(stats + rows.to(tl.int64) + row, mask=counted, other=1.0)
    miss = tl.load(stats + rows.to(tl.int64) * 2 + row, mask=counted, other=0.0)
    spread = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, tl.where(counted, n, 0), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_row + cols, mask=cols < n, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        if flags & HAS_SOFTCAP:
            capped, _ = softcapped(x, softcap)
            x = tl.where(cols < n, capped, x)
        away = x - top
        e = tl.exp2(away * LOG2E)
        spread += tl.where(e == 0, 0.0, e * away)
    x_y = tl.load(x_row + y, mask=counted & (y >= 0) & (y < n), other=float("nan")).to(tl.float32)
    if flags & HAS_SOFTCAP:
        x_y, _ = softcapped(x_y, softcap)
    # Near p_y = 1 the distance to the top says little, the rest of the probability much.
    known = tl.where(miss < 0.5, log1p(-miss), x_y - top - tl.log(total))
    tl.store(log_prob + row, tl.where(counted, tl.where(x_y == x_y, known, x_y), 0.0))
    tl.store(entropy + row, tl.where(counted, tl.log(total) - tl.sum(spread, axis=0) / total, 0.0))


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
def add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def cross_entropy_sum_kernel(
    loss_out, z_loss_out, accuracy_out, totals, partial, loss, z_loss, accuracy, target, weight,
    rows, n, ignore_index, flags,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses and metrics of all rows, added up in a fixed order; what lanes have added few of in fp32 meets in fp64.

    One program does it all; for very many rows, programs leave `partial` sums of 5 numbers for one that follows. A
    target is WORDS int32 words.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    sum_loss = tl.zeros([BLOCK], tl.float32)
    sum_z = tl.zeros([BLOCK], tl.float32)
    sum_right = tl.zeros([BLOCK], tl.float32)
    sum_weight = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    counts = (flags & HAS_TOTALS) == 0
    ignored_low, ignored_high = ignore_index.to(tl.int32), (ignore_index >> 32).to(tl.int32)
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
            # Rows without a target left zeros; not to ask for it spares a wait.
            sum_loss += tl.load(loss + row, mask=inside & ((flags & COUNT_ONLY) == 0), other=0.0)
            sum_z += tl.load(z_loss + row, mask=inside & ((flags & SAVE_Z_LOSS) != 0), other=0.0)
            sum_right += tl.load(accuracy + row, mask=inside & ((flags & SAVE_METRICS) != 0), other=0.0)
            # Word by word: in 64 bits it takes as long to compare thousands of targets as to fetch them.
            low = tl.load(target + row.to(tl.int64) * WORDS, mask=inside & counts, other=0)
            high = low >> 31
            if WORDS == 2:
                high = tl.load(target + row.to(tl.int64) * WORDS + 1, mask=inside & counts, other=0)
            counted = inside & counts & ((low != ignored_low) | (high != ignored_high))
            count += tl.where(counted, 1.0, 0.0)
            if flags & HAS_WEIGHT:
                is_class = (high == 0) & (low >= 0) & (low < n)
                w = tl.load(weight + low, mask=counted & is_class, other=1.0)
                sum_weight += tl.where(counted, w, 0.0)

    all_loss, all_z, all_right, all_weight, all_count = tl.reduce(
        (
            sum_loss.to(tl.float64), sum_z.to(tl.float64), sum_right.to(tl.float64), sum_weight.to(tl.float64),
            count.to(tl.float64),
        ), 0, add_five,
    )  # fmt: skip
    if (flags & HAS_WEIGHT) == 0:
        all_weight = all_count
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
            if flags & HAS_TOTALS:
                all_weight = tl.load(totals).to(tl.float64)
                all_count = tl.load(totals + 1).to(tl.float64)
            # 0 / 0 without any target: NaN, as in PyTorch.
            all_loss /= all_weight
            all_z /= all_count
            all_right /= all_count
        tl.store(loss_out, all_loss + all_z, mask=(flags & COUNT_ONLY) == 0)
        tl.store(z_loss_out, all_z, mask=(flags & SAVE_METRICS) != 0)
        tl.store(accuracy_out, all_right, mask=(flags & SAVE_METRICS) != 0)


NO_LIMITS: dict = {}  # a config that serves every point of the axes


def forward_config(max_n, lanes, tiles, programs_per_sm=0, aligned=True, only=NO_LIMITS):
    constexprs = dict(LANES=lanes, TILES=tiles, SKEWED=int(not aligned))
    return Config(max_n, aligned, lanes // 32, programs_per_sm, constexprs, only=only)


def backward_config(max_n, block_n, blocks, num_warps, aligned=True):
    constexprs = dict(BLOCK_N=block_n, BLOCKS=blocks, SKEWED=int(not aligned))
    return Config(max_n, aligned, num_warps, constexprs=constexprs)


def scale_config(aligned):
    return Config(None, aligned, 8, constexprs=dict(BLOCK_N=8192, BLOCKS=4))


def both_config(
    max_n, lanes, tiles, block_n, aligned=True, share=0, keep=0, keeps_all=False, programs_per_sm=0, common_only=False
):
    """max_n, share and keep count 16-bit logits; one of 32 bits counts twice."""
    assert share % (lanes * tiles * 8) == keep % (lanes * tiles * 8) == 0
    # No block of a part may reach into the next, which another program writes. Extras have a quarter of it; without
    # them, what is shared out is kept.
    assert share // 2 % (block_n // 4) == 0
    constexprs = dict(LANES=lanes, TILES=tiles, SKEWED=int(not aligned), BLOCK_N=block_n)
    constexprs |= dict(SHARE=share, KEEP=keep, KEEPS_ALL=int(keeps_all))
    return Config(max_n, aligned, lanes // 32, programs_per_sm, constexprs, common_only)


def whole_config(keep, lanes, tiles, aligned=True, programs_per_sm=0, common_only=True):
    """For rows that are kept whole."""
    most = keep if aligned else keep - MOST_SKEW.value
    return both_config(most, lanes, tiles, 32 * lanes, aligned, 0, keep, True, programs_per_sm, common_only)


def part_config(max_n, keep, lanes, tiles, aligned=True, programs_per_sm=0, common_only=False):
    """For rows that are shared out, in parts that are kept."""
    return both_config(max_n, lanes, tiles, 16 * lanes, aligned, keep, keep, True, programs_per_sm, common_only)


AXES = {"dtype": [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}], "extras": [{"EXTRAS": 0}, {"EXTRAS": 1}]}

KERNELS = [
    Kernel(
        function=cross_entropy_fwd_kernel,
        args={
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "predicted": "*i64", "stats": "*fp32",
            "logits": "*X", "target": "*i32", "weight": "*fp32", "weight_sum": "*fp32",
            "shares": "*fp32", "arrived": "*i32",
            "rows": "i32", "n": "i32", "part": "i32", "inner_rows": "i32", "logits_outer": "i64", "logits_inner": "i64",
            "target_words": "i32", "ignore_index": "i64",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["logits", "weight", "n", "part", "logits_outer", "logits_inner"],
        axes={"dtype": AXES["dtype"], "form": [{"EXTRAS": e, "SHARED": s} for e, s in ((0, 0), (0, 1), (1, 0))]},
        # Best of a sweep on an H200 (bf16, 2**28 logits and more); the extras follow. Long rows of fp32 take so few registers
        # that six programs would fit on a multiprocessor: 1024 rows would be a round and a third of those, and are nearly two
        # full rounds of four. us of four (of six): 1024 rows of 163840 columns 166 (189), of 262144 253 (288), 2048 of 151936
        # 293 (297), 4096 of 128256 483 (481). Odd rows of 16 bits in two tiles (in four): 1024 of 50257 41 (48), 8192 217
        # (228); of fp32 66 (63).
        configs=[
            forward_config(1024, 32, 4),
            forward_config(65536, 128, 4),
            forward_config(None, 256, 4, 4, only=FLOATS | {"EXTRAS": (0,)}),
            forward_config(None, 256, 4),
            forward_config(1024, 32, 4, aligned=False),
            forward_config(None, 128, 2, aligned=False, only=HALVES),
            forward_config(None, 128, 4, aligned=False),
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
            backward_config(None, 4096, 1, 4),
            backward_config(1024, 1024, 1, 1, aligned=False),
            backward_config(None, 4096, 1, 4, aligned=False),
        ],
    ),
    Kernel(
        function=cross_entropy_fwd_bwd_kernel,
        args={
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "predicted": "*i64",
            "dlogits": "*X", "logits": "*X", "target": "*i32", "grad": "*fp32", "totals": "*fp32",
            "weight": "*fp32", "weight_sum": "*fp32", "shares": "*fp32", "arrived": "*i32",
            "rows": "i32", "n": "i32", "inner_rows": "i32",
            "dlogits_outer": "i64", "dlogits_inner": "i64", "logits_outer": "i64", "logits_inner": "i64",
            "target_words": "i32", "grad_stride": "i64", "ignore_index": "i64",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["dlogits", "logits", "weight", "n", "dlogits_outer", "dlogits_inner", "logits_outer", "logits_inner"],
        axes=AXES,
        # us on an H200, what the kernel reads and writes over 4.255 TB/s in brackets; beside it what it took without rows
        # asked for ahead. 2**28 logits in bf16 (252): 1024 columns 282 (308), 2048 260 (273), 4096 260 (267), 8192 259
        # (268), 16384 260 (271); odd rows: 8003 261 (269), 16003 259 (269). 2**29 (505): 65536 columns 546 (563), 128256 564
        # (570), 151936 568 (580), 262144 581 (592); odd rows: 50257 564 (564). 32000 columns, of which a program keeps but a
        # part, are faster without: 533 (565). To keep no columns costs 1 to 24 % more, odd rows up to 35.
        configs=[
            whole_config(1024, 32, 2),
            whole_config(2048, 32, 2),
            whole_config(4096, 32, 2, common_only=False),
            whole_config(8192, 64, 2),
            whole_config(16384, 128, 2),
            both_config(49152, 256, 4, 8192, keep=16384, programs_per_sm=4),
            part_config(None, 22528, 128, 2, programs_per_sm=4, common_only=True),
            # Extras keep nothing: they read again what is in the cache still, if each program takes little.
            both_config(None, 128, 4, 4096, share=12288, programs_per_sm=6),
            whole_config(1536, 32, 2, aligned=False),
            whole_config(2560, 32, 2, aligned=False),
            whole_config(4096, 64, 1, aligned=False),
            whole_config(8192, 64, 1, aligned=False),
            whole_config(16384, 128, 1, aligned=False, programs_per_sm=5, common_only=False),
            part_config(MOST_PARTS.value * 16384, 18432, 128, 2, aligned=False, programs_per_sm=5),
            both_config(None, 256, 4, 8192, aligned=False),
        ],
    ),
    Kernel(
        function=cross_entropy_describe_kernel,
        args={
            "log_prob": "*fp32", "entropy": "*fp32", "logits": "*X", "target": "*i32", "stats": "*fp32",
            "rows": "i32", "n": "i32", "stride": "i64", "target_words": "i32", "ignore_index": "i64",
            "softcap": "fp32", "flags": "i32",
        },
        aligned=["logits", "n", "stride"],
        axes={"dtype": AXES["dtype"]},
        configs=[
            Config(None, True, 8, constexprs=dict(BLOCK_N=4096)),
            Config(None, False, 8, constexprs=dict(BLOCK_N=4096)),
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
        configs=[scale_config(aligned=True), scale_config(aligned=False)],
    ),
    Kernel(
        function=cross_entropy_sum_kernel,
        args={
            "loss_out": "*fp32", "z_loss_out": "*fp32", "accuracy_out": "*fp32", "totals": "*fp32", "partial": "*fp32",
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "target": "*i32", "weight": "*fp32",
            "rows": "i32", "n": "i32", "ignore_index": "i64", "flags": "i32",
        },
        aligned=[],
        axes={"words": [{"WORDS": 1}, {"WORDS": 2}]},
        configs=[
            Config(None, False, 4, constexprs=dict(BLOCK=1024), max_rows=1024),
            Config(None, False, 32, constexprs=dict(BLOCK=4096)),
        ],
    ),
]  # fmt: skip
