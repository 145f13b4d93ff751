"""Cross entropy of rows of logits against class indices. For a row with true class y out of n:

    x    = logits, or cap * tanh(logits / cap) with a softcap
    lse  = log(sum_j exp(x_j))
    loss = (1 - s) * w_y * (lse - x_y) + s / n * sum_j w_j * (lse - x_j) + lse_square_scale * lse^2

s is label_smoothing, w the class weights. EXTRAS = 0 omits the options that cost time per logit: weights, smoothing,
softcap.

Forward: one program reads a row once. Every thread keeps its own maximum and sum, so the loop has no barrier
and one exp per logit; the threads' results are combined at the end. The true class is excluded from the sums and added
last, so that 1 - p_y and small losses keep all their digits even if the prediction is very confident. `stats` holds
three numbers per row for backward: the largest logit, the sum of exponentials relative to it, and 1 - p_y.

Backward: a gradient depends only on its logit and the row's statistics. A program processes a span of a row, and may
overwrite the logits. fwd_bwd does forward and backward row by row: it keeps the first KEPT columns (see kept.py), and
reads the others again from the L2 cache.

Rows longer than a program can keep are split, PART columns per program. In forward without extras, rows that are too
few to occupy the device are split too (SHARED). The programs of a row wait for each other after the first read, so all
of them must run at the same time: the host does not split a row among more programs than the device has
multiprocessors, and programs take up rows in the order in which they start. arrived: zeros, the number of programs that
started, then of each row's programs that have finished that read.

SKEWED = 1 allows rows of any length and alignment, such as those of an odd vocabulary. Columns are then counted from
the last 128-byte boundary at or before the row, `skew` columns to its left, so that whole tiles are as fast as in
aligned rows.

A row whose target is ignore_index is not read: loss and gradient are 0, the predicted class is -1. A target out of
range reads nothing out of bounds: its row's loss and gradient are NaN. Targets are int32 words, two per int64.
`totals` are the divisors of a mean, (sum of w_y, number of targets). They stay on the device.
"""

import triton
import triton.language as tl

from ..kept import keep
from ..rows import LOG2E, prefetch, programs_ahead, row_offset, strides
from ..table import FLOATS, HALVES, Config, Kernel
from ._flags import HAS_GRAD, HAS_SOFTCAP, LOCAL, MOST_PARTS, MOST_SKEW, SAVE_STATS
from ._gradient import (
    columns_end,
    gradient_kept,
    gradient_span,
    gradient_terms,
    upstream_gradients,
    write_true,
    zero_span,
)
from ._rows import forward_row, load_target, log1p, skew_of, softcapped, start_order, store_row


@triton.jit
def cross_entropy_fwd_kernel(
    loss, z_loss, accuracy, predicted, stats, facts, logits, target, weight, weight_sum, shares, arrived,
    rows, n, part, inner_rows, logits_outer, logits_inner, target_words, ignore_index, first_class,
    label_smoothing, lse_square_scale, softcap, flags,
    EXTRAS: tl.constexpr, SHARED: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr,
):  # fmt: skip
    """SHARED: for few rows; each row is split among several programs, `part` columns each."""
    parts = 1
    own = 0
    row = tl.program_id(0)
    begin = 0
    end = n
    if SHARED:
        parts = tl.cdiv(columns_end(n, SKEWED), part)
        program = start_order(arrived)
        row = program // parts
        own = program - row * parts
        begin = tl.multiple_of(own * part, 8)
        end = tl.minimum(columns_end(n, SKEWED), begin + part)
    y = load_target(target, row, target_words, True)
    if y == ignore_index:
        leads = (begin == 0) & ((flags & LOCAL) == 0)
        store_row(loss, z_loss, accuracy, predicted, row, 0.0, 0.0, tl.full([], -1, tl.int32), y, leads, flags)
    else:
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        top, total, miss = forward_row(
            loss, z_loss, accuracy, predicted, facts, row, rows, x_row, 0, begin, end, y - first_class, first_class,
            weight, weight_sum, n, label_smoothing, lse_square_scale, softcap, flags, shares + row * (parts * 4),
            arrived + 1 + row, own, parts, LANES, TILES, SKEWED, SHARED, EXTRAS, 0, True, "", True,
        )  # fmt: skip
        save = (begin == 0) & ((flags & SAVE_STATS) != 0)
        tl.store(stats + row, top, mask=save)
        tl.store(stats + rows.to(tl.int64) + row, total, mask=save)
        tl.store(stats + rows.to(tl.int64) * 2 + row, miss, mask=save)


@triton.jit
def cross_entropy_bwd_kernel(
    dlogits, logits, target, stats, grad, totals, weight, weight_sum,
    rows, n, inner_rows, dlogits_outer, dlogits_inner, logits_outer, logits_inner, target_words, grad_stride,
    ignore_index, first_class, classes, label_smoothing, lse_square_scale, softcap, flags,
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
        is_class = (y >= 0) & (y < classes)
        y -= first_class
        grad_here, grad_z = upstream_gradients(grad, totals, row, grad_stride, flags, True)
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        x_y = tl.load(x_row + y, mask=(y >= 0) & (y < n), other=0.0).to(tl.float32)
        top = tl.load(stats + row)
        total = tl.load(stats + rows.to(tl.int64) + row)
        miss = tl.load(stats + rows.to(tl.int64) * 2 + row)
        slope, slope_y, drop_y, tilt = gradient_terms(
            classes, y, is_class, top, total, miss, grad_here, grad_z, weight, weight_sum, label_smoothing,
            lse_square_scale, flags, EXTRAS,
        )  # fmt: skip
        # The gradient may overwrite the logits: all reads come first.
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
    """SHARE and KEEP are PART and KEPT, counted in 16-bit logits: a 32-bit logit counts twice."""
    PART: tl.constexpr = SHARE * 16 // logits.dtype.element_ty.primitive_bitwidth
    KEPT: tl.constexpr = 0 if EXTRAS else KEEP * 16 // logits.dtype.element_ty.primitive_bitwidth
    REST: tl.constexpr = EXTRAS or not KEEPS_ALL
    PREFETCHES: tl.constexpr = not REST
    parts = 1
    own = 0
    program = tl.program_id(0)
    row = program
    begin = 0
    end = columns_end(n, SKEWED)
    if PART:
        parts = tl.cdiv(end, PART)
        program = start_order(arrived)
        row = program // parts
        own = program - row * parts
        begin = own * PART
        end = tl.minimum(end, begin + PART)
    out = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
    y = load_target(target, row, target_words, True)
    if PREFETCHES:
        later = program + programs_ahead(2 * KEEP)
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
        # Loaded before the programs of a row wait for each other.
        grad_here, grad_z = upstream_gradients(grad, totals, row, grad_stride, flags, (flags & HAS_GRAD) != 0)
        x_y = tl.load(x_row + y, mask=(y >= 0) & (y < n), other=0.0).to(tl.float32)
        skew = 0
        if SKEWED:
            skew = skew_of(x_row)
        kept = 0
        if KEPT:
            kept = keep(tl.multiple_of(x_row - skew, 16), begin, skew, n + skew, KEPT, LANES)
        if PREFETCHES:
            wanted = (later < rows) & (later_y != ignore_index)
            last = tl.where(wanted, tl.minimum(first + KEPT, n), first)
            prefetch(logits + row_offset(later, inner_rows, logits_outer, logits_inner), first, last)
        # Long rows need no hint to stay in the cache, because few are in use; it would only evict other data.
        FIRST_READ: tl.constexpr = "" if PART else "evict_last"
        top, total, miss = forward_row(
            loss, z_loss, accuracy, predicted, 0, row, rows, x_row, kept, begin, end, y, 0, weight, weight_sum,
            n, label_smoothing, lse_square_scale, softcap, flags, shares + row.to(tl.int64) * (parts * 4),
            arrived + 1 + row, own, parts, LANES, TILES, SKEWED, PART, EXTRAS, KEPT, REST, FIRST_READ, False,
        )  # fmt: skip
        slope, slope_y, drop_y, tilt = gradient_terms(
            n, y, (y >= 0) & (y < n), top, total, miss, grad_here, grad_z, weight, weight_sum, label_smoothing,
            lse_square_scale, flags, EXTRAS,
        )  # fmt: skip
        # No thread may overwrite a logit before all threads have read it.
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
    """log p_y and the entropy of the distribution, for every row with a target; zeros for a row without one. With the
    flag LOCAL, only the entropy."""
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
    # Near p_y = 1, log(1 - miss) is more accurate than the distance to the largest logit.
    known = tl.where(miss < 0.5, log1p(-miss), x_y - top - tl.log(total))
    tl.store(log_prob + row, tl.where(counted, tl.where(x_y == x_y, known, x_y), 0.0), mask=(flags & LOCAL) == 0)
    tl.store(entropy + row, tl.where(counted, tl.log(total) - tl.sum(spread, axis=0) / total, 0.0))


@triton.jit
def cross_entropy_scale_kernel(
    dlogits, grad, n, inner_rows, dlogits_outer, dlogits_inner, grad_stride, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr
):
    """Multiplies a gradient that forward computed by the upstream gradient of the loss. If that is 1, does nothing."""
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
    """max_n, share and keep are counted in 16-bit logits: a 32-bit logit counts twice."""
    assert share % (lanes * tiles * 8) == keep % (lanes * tiles * 8) == 0
    # No block may extend into the next part, which another program writes. With extras, blocks have block_n // 4
    # columns; without extras, a part is kept and not processed in blocks.
    assert share // 2 % (block_n // 4) == 0
    constexprs = dict(LANES=lanes, TILES=tiles, SKEWED=int(not aligned), BLOCK_N=block_n)
    constexprs |= dict(SHARE=share, KEEP=keep, KEEPS_ALL=int(keeps_all))
    return Config(max_n, aligned, lanes // 32, programs_per_sm, constexprs, common_only)


def whole_config(keep, lanes, tiles, aligned=True, programs_per_sm=0, common_only=True):
    """For rows that one program keeps completely."""
    most = keep if aligned else keep - MOST_SKEW.value
    return both_config(most, lanes, tiles, 32 * lanes, aligned, 0, keep, True, programs_per_sm, common_only)


def part_config(max_n, keep, lanes, tiles, aligned=True, programs_per_sm=0, common_only=False):
    """For rows that are split into parts; each program keeps its part completely."""
    return both_config(max_n, lanes, tiles, 16 * lanes, aligned, keep, keep, True, programs_per_sm, common_only)


AXES = {"dtype": [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}], "extras": [{"EXTRAS": 0}, {"EXTRAS": 1}]}

KERNELS = [
    Kernel(
        function=cross_entropy_fwd_kernel,
        args={
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "predicted": "*i64", "stats": "*fp32",
            "facts": "*fp32", "logits": "*X", "target": "*i32", "weight": "*fp32", "weight_sum": "*fp32",
            "shares": "*fp32", "arrived": "*i32",
            "rows": "i32", "n": "i32", "part": "i32", "inner_rows": "i32", **strides("logits"),
            "target_words": "i32", "ignore_index": "i64", "first_class": "i32",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["logits", "weight", "n", "part", *strides("logits")],
        axes={"dtype": AXES["dtype"], "form": [{"EXTRAS": e, "SHARED": s} for e, s in ((0, 0), (0, 1), (1, 0))]},
        # The fastest shapes on an H200. Long fp32 rows need so few registers that six programs fit on a multiprocessor;
        # four divide 1024 rows more evenly.
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
            **strides("dlogits", "logits"),
            "target_words": "i32", "grad_stride": "i64", "ignore_index": "i64", "first_class": "i32", "classes": "i32",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["dlogits", "logits", "weight", "n", *strides("dlogits", "logits")],
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
            **strides("dlogits", "logits"),
            "target_words": "i32", "grad_stride": "i64", "ignore_index": "i64",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "softcap": "fp32", "flags": "i32",
        },
        aligned=["dlogits", "logits", "weight", "n", *strides("dlogits", "logits")],
        axes=AXES,
        # The fastest shapes on an H200. Programs that keep only a part of a row do not prefetch, because that is
        # slower.
        configs=[
            whole_config(1024, 32, 2),
            whole_config(2048, 32, 2),
            whole_config(4096, 32, 2, common_only=False),
            whole_config(8192, 64, 2),
            whole_config(16384, 128, 2),
            both_config(49152, 256, 4, 8192, keep=16384, programs_per_sm=4),
            part_config(None, 22528, 128, 2, programs_per_sm=4, common_only=True),
            # With extras nothing is kept. Columns are read again from the cache, which requires a small part per
            # program.
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
            **strides("dlogits"), "grad_stride": "i64",
        },
        aligned=["dlogits", "n", *strides("dlogits")],
        axes={"dtype": AXES["dtype"]},
        configs=[scale_config(aligned=True), scale_config(aligned=False)],
    ),
]  # fmt: skip
