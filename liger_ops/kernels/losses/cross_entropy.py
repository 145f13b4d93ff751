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

Rows longer than a program can keep are split, PART columns per program. So are SHARED ones in forward,
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

from ..kept import keep
from ..rows import LOG2E, prefetch, programs_ahead, row_offset
from ..table import FLOATS, HALVES, Config, Kernel
from ._flags import (
    COUNT_ONLY,
    FROM_PARTIAL,
    HAS_GRAD,
    HAS_SOFTCAP,
    HAS_TOTALS,
    HAS_WEIGHT,
    MEAN,
    MOST_PARTS,
    MOST_SKEW,
    SAVE_METRICS,
    SAVE_STATS,
    SAVE_TOTALS,
    SAVE_Z_LOSS,
    TO_PARTIAL,
)
from ._gradient import arriving, columns_end, gradient_kept, gradient_span, gradient_terms, write_true, zero_span
from ._rows import forward_row, load_target, log1p, skew_of, softcapped, store_row


@triton.jit
def cross_entropy_fwd_kernel(
    loss, z_loss, accuracy, predicted, stats, logits, target, weight, weight_sum, shares, arrived,
    rows, n, part, inner_rows, logits_outer, logits_inner, target_words, ignore_index,
    label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, SHARED: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr,
):  # fmt: skip
    """SHARED: few rows; several programs share one, `part` columns each."""
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
    # No block may cross into the next part, which another program writes. Blocks are block_n // 4 columns with extras;
    # without extras a shared part stays in registers.
    assert share // 2 % (block_n // 4) == 0
    constexprs = dict(LANES=lanes, TILES=tiles, SKEWED=int(not aligned), BLOCK_N=block_n)
    constexprs |= dict(SHARE=share, KEEP=keep, KEEPS_ALL=int(keeps_all))
    return Config(max_n, aligned, lanes // 32, programs_per_sm, constexprs, common_only)


def whole_config(keep, lanes, tiles, aligned=True, programs_per_sm=0, common_only=True):
    """For rows that are kept whole."""
    most = keep if aligned else keep - MOST_SKEW.value
    return both_config(most, lanes, tiles, 32 * lanes, aligned, 0, keep, True, programs_per_sm, common_only)


def part_config(max_n, keep, lanes, tiles, aligned=True, programs_per_sm=0, common_only=False):
    """For rows that are split into parts that programs keep."""
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
