"""Log-probabilities of some ids in rows of logits, and the entropy of each row. For a row with n logits and K ids:

    v        = logits, or cap * tanh(logits / cap) with a softcap (CAPPED)
    away_j   = (v_j - peak) / temperature, peak: the largest v
    total    = sum_j exp(away_j)
    mean     = sum_j exp(away_j) away_j / total
    log_prob = away_id - log total
    entropy  = log total - mean

Kernels compute exponentials as powers of two: factor is log2(e) / temperature.

Forward: one program reads a row once. Every thread keeps its own peak and sums; they are combined at the end. If rows
are too few to occupy the device, a row is split into parts, which `combine` puts together. For backward, `stats` holds
(peak, total, mean) of each row and `chosen` the logits of the ids.

Backward, with g_k the gradient of the id k, h that of the entropy and s that of peak / temperature + log total:

    d / d v_j = (exp(away_j) / total * (s + h mean - sum_k g_k - h away_j) + sum of g_k with id_k = j) / temperature

A program processes a span of a row, and may overwrite the logits. Last it writes the gradients of the ids in its span,
which it computes from `chosen`.

SKEWED = 1 allows rows of any length and alignment, see cross_entropy.py. A row whose ids are all ignore_index is not
read: its results and gradients are 0. An id out of range reads nothing out of bounds: its log-probability and its row's
gradient are NaN. Ids are int32 words, two per int64.

The columns may be a part of all `classes`, from `first_class` on. Then forward's results describe this part alone, and
`chosen` of an id outside of it is 0. Backward takes the `stats` of all classes.

With EXTRAS, forward also stores the mean of v / temperature, log(sum_j p_j^2), and whether each id is the first column
with the largest v.
"""

import triton
import triton.language as tl

from ..rows import row_offset, strides
from ..table import HALVES, Config, Kernel
from ._flags import LN2, LOWEST, MOST_PARTS, NOWHERE
from ._gradient import columns_end, zero_span
from ._rows import lane_columns, load_lanes, load_target, same_alignment, skew_of, softcapped

WITH_ENTROPY = tl.constexpr(1)
WITH_GRAPH = tl.constexpr(2)
OF_LOG_PROBS = tl.constexpr(4)
OF_ENTROPY = tl.constexpr(8)
# The gradient of -log total, with 0 in the columns of ids.
OF_OTHERS = tl.constexpr(16)
WITH_MEAN_LOGITS = tl.constexpr(32)
WITH_SQUARES = tl.constexpr(64)
WITH_TOP1 = tl.constexpr(128)
OF_LOG_SUM_EXP = tl.constexpr(256)

# A power of two below this is 0. The limit avoids 0 * -inf.
NO_POWER = tl.constexpr(-1000.0)
SHARE = tl.constexpr(6)  # numbers that a part of a row stores


@triton.jit
def power_of(v, peak, factor):
    """(exponent, 2 ** exponent)"""
    exponent = tl.maximum((v - peak) * factor, NO_POWER, propagate_nan=tl.PropagateNan.ALL)
    return exponent, tl.exp2(exponent)


@triton.jit
def rebased(total, spread, peak, new_peak, factor):
    """(total, spread, scale) relative to another peak. spread: sum of 2 ** exponent * exponent"""
    shift, scale = power_of(peak, new_peak, factor)
    return total * scale, (spread + shift * total) * scale, scale


@triton.jit
def load_tile(row, start, skew, limit, mask, softcap, LANES: tl.constexpr, CAPPED: tl.constexpr):
    """(v, whether the column is in the row)"""
    VEC: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    v = load_lanes(row, start, skew, limit, mask, LANES, VEC, "").to(tl.float32)
    if CAPPED:
        v, _ = softcapped(v, softcap)
    at = lane_columns(start, LANES, VEC)
    return v, (at >= skew) & (at < limit)


@triton.jit
def scan_tiles(
    peak, total, spread, squares, level, best, row, start, skew, limit, factor, softcap,
    LANES: tl.constexpr, TILES: tl.constexpr, CAPPED: tl.constexpr, EXTRAS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Adds TILES tiles to the lanes' sums. WHOLE: all columns are in the row."""
    VEC: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    TILE: tl.constexpr = LANES * VEC
    raw = ()
    for t in tl.static_range(TILES):
        if WHOLE:
            raw = raw + (tl.load(row + lane_columns(start + t * TILE, LANES, VEC)),)
        else:
            raw = raw + (load_lanes(row, start + t * TILE, skew, limit, True, LANES, VEC, ""),)
    vs = ()
    new_peak = peak
    for t in tl.static_range(TILES):
        v = raw[t].to(tl.float32)
        if CAPPED:
            v, _ = softcapped(v, softcap)
        if WHOLE:
            if EXTRAS:
                level += tl.sum(v, axis=1)
        else:
            at = lane_columns(start + t * TILE, LANES, VEC)
            inside = (at >= skew) & (at < limit)
            if EXTRAS:
                level += tl.sum(tl.where(inside, v, 0.0), axis=1)
            v = tl.where(inside, v, float("-inf"))
        new_peak = tl.maximum(new_peak, tl.max(v, axis=1))
        vs = vs + (v,)
    if EXTRAS:
        best = tl.where(new_peak > peak, start, best)
    total, spread, scale = rebased(total, spread, peak, new_peak, factor)
    squares *= scale * scale
    for t in tl.static_range(TILES):
        exponent, e = power_of(vs[t], new_peak[:, None], factor)
        total += tl.sum(e, axis=1)
        spread += tl.sum(e * exponent, axis=1)
        if EXTRAS:
            squares += tl.sum(e * e, axis=1)
    return new_peak, total, spread, squares, level, best


@triton.jit
def combine(peak, total, spread, squares, level, first, factor):
    top = tl.max(peak, axis=0)
    total, spread, scale = rebased(total, spread, peak, top, factor)
    squares *= scale * scale
    first = tl.min(tl.where(peak == top, first, NOWHERE), axis=0)
    return top, tl.sum(total, axis=0), tl.sum(spread, axis=0), tl.sum(squares, axis=0), tl.sum(level, axis=0), first


@triton.jit
def scan_span(
    row, begin, end, n, factor, softcap,
    LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, CAPPED: tl.constexpr, EXTRAS: tl.constexpr,
):  # fmt: skip
    """(peak, total, spread, squares, level, first) of the columns begin..end, counted from the skewed start of the row.
    level: sum of v, first: first column of the row with the largest v."""
    VEC: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    skew = 0
    if SKEWED:
        skew = skew_of(row)
        row = tl.multiple_of(row - skew, 16)
    limit = tl.minimum(n + skew, end)
    peak = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    spread = tl.zeros([LANES], tl.float32)
    squares = tl.zeros([LANES], tl.float32)
    level = tl.zeros([LANES], tl.float32)
    best = tl.zeros([LANES], tl.int32)
    # A softcap and extras need more registers, and their arithmetic hides the loads.
    GROUP: tl.constexpr = 1 if CAPPED or EXTRAS else TILES
    SPAN: tl.constexpr = GROUP * LANES * VEC
    for start in range(begin, limit, SPAN):
        if (start >= skew) & (start + SPAN <= limit):
            peak, total, spread, squares, level, best = scan_tiles(
                peak, total, spread, squares, level, best, row, start, skew, limit, factor, softcap,
                LANES, GROUP, CAPPED, EXTRAS, True,
            )  # fmt: skip
        else:
            peak, total, spread, squares, level, best = scan_tiles(
                peak, total, spread, squares, level, best, row, start, skew, limit, factor, softcap,
                LANES, GROUP, CAPPED, EXTRAS, False,
            )  # fmt: skip
    first = tl.full([LANES], NOWHERE, tl.int32)
    if EXTRAS:
        # Only lanes that hold the maximum read again, and only the tile where they first found it.
        highest = tl.max(peak, axis=0)
        wanted = (peak == highest)[:, None]
        v, inside = load_tile(row, best[:, None], skew, limit, wanted, softcap, LANES, CAPPED)
        at = lane_columns(best[:, None], LANES, VEC)
        first = tl.min(tl.where(wanted & inside & (v == highest), at - skew, NOWHERE), axis=1)
    return combine(peak, total, spread, squares, level, first, factor)


@triton.jit
def load_ids(index, row, start, count, words, ignore_index, first_class, classes, n, IDS: tl.constexpr):
    """(place of each id, its column, whether it counts, whether it is a column here, whether it is out of range)"""
    k = start + tl.arange(0, IDS)
    place = row.to(tl.int64) * count + k
    ids = load_target(index, place, words, k < count)
    counted = (k < count) & (ids != ignore_index)
    column = ids - first_class
    valid = counted & (column >= 0) & (column < n)
    return place, column, counted, valid, counted & ((ids < 0) | (ids >= classes))


@triton.jit
def has_ids(index, row, count, words, ignore_index, first_class, classes, n, IDS: tl.constexpr):
    found = tl.zeros([IDS], tl.int32)
    for start in range(0, count, IDS):
        _, _, counted, _, _ = load_ids(index, row, start, count, words, ignore_index, first_class, classes, n, IDS)
        found |= counted.to(tl.int32)
    return tl.max(found, axis=0) != 0


@triton.jit
def finish_row(
    log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, x_row, index, row, n, count, words,
    ignore_index, first_class, classes, peak, total, spread, squares, level, first, inverse, softcap, flags,
    CAPPED: tl.constexpr, EXTRAS: tl.constexpr, IDS: tl.constexpr, GIVEN: tl.constexpr = False,
):  # fmt: skip
    """inverse: 1 / temperature. GIVEN: x_row has the logits of the row's ids, not of all columns."""
    log_total = tl.log(total)
    mean = tl.div_rn(spread * LN2, total)
    tl.store(entropy + row, log_total - mean, mask=(flags & WITH_ENTROPY) != 0)
    saved = (flags & WITH_GRAPH) != 0
    at = stats + row.to(tl.int64) * 3
    tl.store(at, peak, mask=saved)
    tl.store(at + 1, total, mask=saved)
    tl.store(at + 2, mean, mask=saved)
    if EXTRAS:
        tl.store(mean_logits + row, level * inverse / n, mask=(flags & WITH_MEAN_LOGITS) != 0)
        tl.store(log_squares + row, tl.log(squares) - 2 * log_total, mask=(flags & WITH_SQUARES) != 0)
    for start in range(0, count, IDS):
        place, column, counted, valid, stray = load_ids(
            index, row, start, count, words, ignore_index, first_class, classes, n, IDS
        )
        inside = place < (row.to(tl.int64) + 1) * count
        at_id = place - row.to(tl.int64) * count if GIVEN else column
        x = tl.load(x_row + at_id, mask=valid, other=0.0).to(tl.float32)
        x = tl.where(stray, float("nan"), x)
        v = x
        if CAPPED:
            v, _ = softcapped(x, softcap)
        tl.store(log_probs + place, tl.where(counted, (v - peak) * inverse - log_total, 0.0), mask=inside)
        tl.store(chosen + place, x, mask=inside & saved)
        if EXTRAS:
            top1 = valid & (column == first)
            tl.store(is_top1 + place, top1.to(tl.int8), mask=inside & ((flags & WITH_TOP1) != 0))


@triton.jit
def store_ignored(
    log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, row, count, flags,
    EXTRAS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    tl.store(entropy + row, 0.0, mask=(flags & WITH_ENTROPY) != 0)
    saved = (flags & WITH_GRAPH) != 0
    for i in tl.static_range(3):
        tl.store(stats + row.to(tl.int64) * 3 + i, 0.0, mask=saved)
    if EXTRAS:
        tl.store(mean_logits + row, 0.0, mask=(flags & WITH_MEAN_LOGITS) != 0)
        tl.store(log_squares + row, 0.0, mask=(flags & WITH_SQUARES) != 0)
    for start in range(0, count, IDS):
        k = start + tl.arange(0, IDS)
        place = row.to(tl.int64) * count + k
        zeros = tl.zeros([IDS], tl.float32)
        tl.store(log_probs + place, zeros, mask=k < count)
        tl.store(chosen + place, zeros, mask=(k < count) & saved)
        if EXTRAS:
            tl.store(is_top1 + place, zeros.to(tl.int8), mask=(k < count) & ((flags & WITH_TOP1) != 0))


@triton.jit
def log_probs_fwd_kernel(
    log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, shares, logits, index,
    n, part, inner_rows, count, logits_outer, logits_inner, first_class, classes,
    index_words, ignore_index, factor, inverse, softcap, flags,
    CAPPED: tl.constexpr, EXTRAS: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr,
    IDS: tl.constexpr,
):  # fmt: skip
    """part: columns per program, if rows are split; else 0."""
    row = tl.program_id(0)
    begin = 0
    end = columns_end(n, SKEWED)
    if part != 0:
        parts = tl.cdiv(end, part)
        row = tl.program_id(0) // parts
        begin = tl.multiple_of((tl.program_id(0) - row * parts) * part, 8)
        end = tl.minimum(end, begin + part)
    if has_ids(index, row, count, index_words, ignore_index, first_class, classes, n, IDS):
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        peak, total, spread, squares, level, first = scan_span(
            x_row, begin, end, n, factor, softcap, LANES, TILES, SKEWED, CAPPED, EXTRAS
        )
        if part != 0:
            at = shares + tl.program_id(0).to(tl.int64) * SHARE
            tl.store(at, peak)
            tl.store(at + 1, total)
            tl.store(at + 2, spread)
            if EXTRAS:
                tl.store(at + 3, squares)
                tl.store(at + 4, level)
                tl.store(at + 5, first.to(tl.float32, bitcast=True))
        else:
            finish_row(
                log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, x_row, index, row, n, count,
                index_words, ignore_index, first_class, classes, peak, total, spread, squares, level, first,
                inverse, softcap, flags, CAPPED, EXTRAS, IDS,
            )  # fmt: skip
    elif part == 0:
        store_ignored(
            log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, row, count, flags, EXTRAS, IDS
        )


@triton.jit
def log_probs_combine_kernel(
    log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, shares, logits, index,
    n, parts, inner_rows, count, logits_outer, logits_inner, first_class, classes,
    index_words, ignore_index, factor, inverse, softcap, flags,
    CAPPED: tl.constexpr, EXTRAS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if has_ids(index, row, count, index_words, ignore_index, first_class, classes, n, IDS):
        each = tl.arange(0, MOST_PARTS)
        there = each < parts
        at = shares + (row.to(tl.int64) * parts + each) * SHARE
        peak = tl.load(at, mask=there, other=LOWEST)
        total = tl.load(at + 1, mask=there, other=0.0)
        spread = tl.load(at + 2, mask=there, other=0.0)
        squares = tl.zeros([MOST_PARTS], tl.float32)
        level = tl.zeros([MOST_PARTS], tl.float32)
        first = tl.full([MOST_PARTS], NOWHERE, tl.int32)
        if EXTRAS:
            squares = tl.load(at + 3, mask=there, other=0.0)
            level = tl.load(at + 4, mask=there, other=0.0)
            first = tl.load(at + 5, mask=there, other=0.0).to(tl.int32, bitcast=True)
            first = tl.where(there, first, NOWHERE)
        peak, total, spread, squares, level, first = combine(peak, total, spread, squares, level, first, factor)
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        finish_row(
            log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, x_row, index, row, n, count,
            index_words, ignore_index, first_class, classes, peak, total, spread, squares, level, first,
            inverse, softcap, flags, CAPPED, EXTRAS, IDS,
        )  # fmt: skip
    else:
        store_ignored(
            log_probs, entropy, stats, chosen, mean_logits, log_squares, is_top1, row, count, flags, EXTRAS, IDS
        )


@triton.jit
def gradient_of(x, peak, factor, level, tilt, softcap, CAPPED: tl.constexpr):
    """(gradient but for the ids, slope of the softcap)"""
    v = x
    slope = tl.full(x.shape, 1.0, tl.float32)
    if CAPPED:
        v, slope = softcapped(x, softcap)
    exponent, e = power_of(v, peak, factor)
    return e * (level + tilt * exponent), slope


@triton.jit
def load_grads(grad, place, counted, stray, flags):
    g = tl.load(grad + place, mask=counted & ((flags & OF_LOG_PROBS) != 0), other=0.0)
    return tl.where(stray, float("nan"), g)


@triton.jit
def load_logits(at, peaks, cols, skew, mask, TILE: tl.constexpr):
    """at: skew elements before the row."""
    other = None if mask is None else 0.0
    x = tl.load(at + cols, mask=mask, other=other).to(tl.float32)
    if TILE:
        x += tl.load(peaks + (cols - skew) // TILE * SHARE, mask=mask, other=other)
    return x


@triton.jit
def differentiate_span(
    out, x_row, peaks, row, begin, end, index, stats, chosen, grad, grad_entropy, grad_log_sum_exp, n, count, first_class,
    classes, index_words, ignore_index, factor, inverse, softcap, flags,
    CAPPED: tl.constexpr, BLOCK_N: tl.constexpr, SKEWED: tl.constexpr, IDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE: the number of columns whose logits are relative to one of `peaks`, which are SHARE numbers apart. 0: they are
    not."""
    found = tl.zeros([IDS], tl.int32)
    pulls = tl.zeros([IDS], tl.float32)
    for start in range(0, count, IDS):
        place, _, counted, _, stray = load_ids(
            index, row, start, count, index_words, ignore_index, first_class, classes, n, IDS
        )
        found |= counted.to(tl.int32)
        pulls += load_grads(grad, place, counted, stray, flags)
    if tl.max(found, axis=0) == 0:
        zero_span(out, begin, end, n, BLOCK_N, SKEWED)
    else:
        at = stats + row.to(tl.int64) * 3
        peak = tl.load(at)
        total = tl.load(at + 1)
        mean = tl.load(at + 2)
        h = tl.load(grad_entropy + row, mask=(flags & OF_ENTROPY) != 0, other=0.0)
        of_others = (flags & OF_OTHERS) != 0
        s = tl.load(grad_log_sum_exp + row, mask=(flags & OF_LOG_SUM_EXP) != 0, other=0.0)
        pull = tl.where(of_others, 1.0, tl.sum(pulls, axis=0) - s)
        level = tl.div_rn((h * mean - pull) * inverse, total)
        tilt = tl.div_rn(-h * LN2 * inverse, total)

        skew = 0
        aligned = True
        if SKEWED:
            skew = skew_of(x_row)
            # If not, the row is written element by element.
            aligned = same_alignment(out, skew)
        limit = n + skew
        BLOCK: tl.constexpr = BLOCK_N // 4 if CAPPED else BLOCK_N
        for start in range(begin, end, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            mask = (cols >= skew) & (cols < limit)
            if aligned & (start >= skew) & (start + BLOCK <= limit):
                x = load_logits(tl.multiple_of(x_row - skew, 16), peaks, cols, skew, None, TILE)
                dx, slope = gradient_of(x, peak, factor, level, tilt, softcap, CAPPED)
                tl.store(tl.multiple_of(out - skew, 16) + cols, (dx * slope).to(out.dtype.element_ty))
            else:
                x = load_logits(x_row - skew, peaks, cols, skew, mask, TILE)
                dx, slope = gradient_of(x, peak, factor, level, tilt, softcap, CAPPED)
                tl.store(out - skew + cols, (dx * slope).to(out.dtype.element_ty), mask=mask)

        # The ids' gradients come last.
        tl.debug_barrier()
        for start in range(0, tl.where((flags & (OF_LOG_PROBS | OF_OTHERS)) != 0, count, 0), IDS):
            place, column, counted, valid, _ = load_ids(
                index, row, start, count, index_words, ignore_index, first_class, classes, n, IDS
            )
            # Equal ids store the same number.
            own = tl.zeros([IDS], tl.float32)
            for other in range(0, tl.where(of_others, 0, count), IDS):
                there, others, counts, exist, stray = load_ids(
                    index, row, other, count, index_words, ignore_index, first_class, classes, n, IDS
                )
                g = load_grads(grad, there, counts, stray, flags)
                same = (column[:, None] == others[None, :]) & exist[None, :]
                own += tl.sum(tl.where(same, g[None, :], 0.0), axis=1)
            x = tl.load(chosen + place, mask=valid, other=0.0)
            dx, slope = gradient_of(x, peak, factor, level, tilt, softcap, CAPPED)
            dx = tl.where(of_others, 0.0, (dx + own * inverse) * slope)
            mine = valid & (column + skew >= begin) & (column + skew < end)
            tl.store(out + column, dx.to(out.dtype.element_ty), mask=mine)


@triton.jit
def log_probs_bwd_kernel(
    dlogits, logits, index, stats, chosen, grad, grad_entropy, grad_log_sum_exp,
    n, inner_rows, count, dlogits_outer, dlogits_inner, logits_outer, logits_inner, first_class, classes,
    index_words, ignore_index, factor, inverse, softcap, flags,
    CAPPED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, SKEWED: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    spans = tl.cdiv(columns_end(n, SKEWED), BLOCK_N * BLOCKS)
    row = tl.program_id(0) // spans
    begin = (tl.program_id(0) - row * spans) * (BLOCK_N * BLOCKS)
    end = tl.minimum(columns_end(n, SKEWED), begin + BLOCK_N * BLOCKS)
    out = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
    x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
    differentiate_span(
        out, x_row, stats, row, begin, end, index, stats, chosen, grad, grad_entropy, grad_log_sum_exp, n, count,
        first_class, classes, index_words, ignore_index, factor, inverse, softcap, flags, CAPPED, BLOCK_N, SKEWED, IDS, 0,
    )  # fmt: skip


NO_LIMITS: dict = {}  # a config that serves every point of the axes
AT_A_TIME = dict(IDS=16)


def forward_config(max_n, lanes, tiles, aligned=True, only=NO_LIMITS):
    constexprs = dict(LANES=lanes, TILES=tiles, SKEWED=int(not aligned)) | AT_A_TIME
    return Config(max_n, aligned, lanes // 32, constexprs=constexprs, only=only)


def backward_config(max_n, block_n, num_warps, aligned=True, common_only=False):
    constexprs = dict(BLOCK_N=block_n, BLOCKS=1, SKEWED=int(not aligned)) | AT_A_TIME
    return Config(max_n, aligned, num_warps, constexprs=constexprs, common_only=common_only)


DTYPES = [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}]
# Of gradients and logits. Linear losses keep logits in fp32.
GRADIENT_DTYPES = [
    *({"X": dtype, "L": dtype} for dtype in ("bf16", "fp16", "fp32")),
    *({"X": dtype, "L": "fp32"} for dtype in ("bf16", "fp16")),
]
CAPS = [{"CAPPED": 0}, {"CAPPED": 1}]
FORWARD_AXES = {"dtype": DTYPES, "form": [cap | {"EXTRAS": extras} for extras in (0, 1) for cap in CAPS]}
RESULTS = {
    "log_probs": "*fp32", "entropy": "*fp32", "stats": "*fp32", "chosen": "*fp32", "mean_logits": "*fp32",
    "log_squares": "*fp32", "is_top1": "*i8", "shares": "*fp32", "logits": "*X", "index": "*i32",
}  # fmt: skip
OPTIONS = {
    "first_class": "i32", "classes": "i32",
    "index_words": "i32", "ignore_index": "i64", "factor": "fp32", "inverse": "fp32", "softcap": "fp32", "flags": "i32",
}  # fmt: skip

KERNELS = [
    Kernel(
        function=log_probs_fwd_kernel,
        args={
            **RESULTS, "n": "i32", "part": "i32", "inner_rows": "i32", "count": "i32",
            **strides("logits"), **OPTIONS,
        },
        aligned=["logits", "n", "part", *strides("logits")],
        axes=FORWARD_AXES,
        configs=[
            forward_config(1024, 32, 4),
            forward_config(None, 128, 4),
            forward_config(1024, 32, 4, aligned=False),
            forward_config(None, 128, 2, aligned=False, only=HALVES),
            forward_config(None, 128, 4, aligned=False),
        ],
    ),
    Kernel(
        function=log_probs_combine_kernel,
        args={
            **RESULTS, "n": "i32", "parts": "i32", "inner_rows": "i32", "count": "i32",
            **strides("logits"), **OPTIONS,
        },
        aligned=[],
        axes=FORWARD_AXES,
        configs=[Config(None, False, 4, constexprs=AT_A_TIME)],
    ),
    Kernel(
        function=log_probs_bwd_kernel,
        args={
            "dlogits": "*X", "logits": "*L", "index": "*i32", "stats": "*fp32", "chosen": "*fp32", "grad": "*fp32",
            "grad_entropy": "*fp32", "grad_log_sum_exp": "*fp32", "n": "i32", "inner_rows": "i32", "count": "i32",
            **strides("dlogits", "logits"), **OPTIONS,
        },
        aligned=["dlogits", "logits", "n", *strides("dlogits", "logits")],
        axes={"dtype": GRADIENT_DTYPES, "form": CAPS},
        configs=[
            backward_config(1024, 1024, 1, common_only=True),
            backward_config(None, 4096, 4),
            backward_config(1024, 1024, 1, aligned=False, common_only=True),
            backward_config(None, 4096, 4, aligned=False),
        ],
    ),
]  # fmt: skip
