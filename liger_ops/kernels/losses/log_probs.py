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

Backward, with g_k the gradient of the id k and h that of the entropy:

    d / d v_j = (exp(away_j) / total * (h mean - sum_k g_k - h away_j) + sum of g_k with id_k = j) / temperature

A program processes a span of a row, and may overwrite the logits. Last it writes the gradients of the ids in its span,
which it computes from `chosen`.

SKEWED = 1 allows rows of any length and alignment, see cross_entropy.py. A row whose ids are all ignore_index is not
read: its results and gradients are 0. An id out of range reads nothing out of bounds: its log-probability and its row's
gradient are NaN. Ids are int32 words, two per int64.
"""

import triton
import triton.language as tl

from ..rows import row_offset
from ..table import HALVES, Config, Kernel
from ._flags import LN2, LOWEST, MOST_PARTS
from ._gradient import columns_end, zero_span
from ._rows import lane_columns, load_lanes, load_target, same_alignment, skew_of, softcapped

WITH_ENTROPY = tl.constexpr(1)
WITH_GRAPH = tl.constexpr(2)
OF_LOG_PROBS = tl.constexpr(4)
OF_ENTROPY = tl.constexpr(8)

# A power of two below this is 0. The limit avoids 0 * -inf.
NO_POWER = tl.constexpr(-1000.0)


@triton.jit
def power_of(v, peak, factor):
    """(exponent, 2 ** exponent)"""
    exponent = tl.maximum((v - peak) * factor, NO_POWER, propagate_nan=tl.PropagateNan.ALL)
    return exponent, tl.exp2(exponent)


@triton.jit
def rebased(total, spread, peak, new_peak, factor):
    """Sums relative to another peak. spread: sum of 2 ** exponent * exponent"""
    shift, scale = power_of(peak, new_peak, factor)
    return total * scale, (spread + shift * total) * scale


@triton.jit
def scan_tiles(
    peak, total, spread, row, start, skew, limit, factor, softcap,
    LANES: tl.constexpr, TILES: tl.constexpr, CAPPED: tl.constexpr, WHOLE: tl.constexpr,
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
        if not WHOLE:
            at = lane_columns(start + t * TILE, LANES, VEC)
            v = tl.where((at >= skew) & (at < limit), v, float("-inf"))
        new_peak = tl.maximum(new_peak, tl.max(v, axis=1))
        vs = vs + (v,)
    total, spread = rebased(total, spread, peak, new_peak, factor)
    for t in tl.static_range(TILES):
        exponent, e = power_of(vs[t], new_peak[:, None], factor)
        total += tl.sum(e, axis=1)
        spread += tl.sum(e * exponent, axis=1)
    return new_peak, total, spread


@triton.jit
def combine(peak, total, spread, factor):
    top = tl.max(peak, axis=0)
    total, spread = rebased(total, spread, peak, top, factor)
    return top, tl.sum(total, axis=0), tl.sum(spread, axis=0)


@triton.jit
def scan_span(
    row, begin, end, n, factor, softcap,
    LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """(peak, total, spread) of the columns begin..end, counted from the skewed start of the row."""
    VEC: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    skew = 0
    if SKEWED:
        skew = skew_of(row)
        row = tl.multiple_of(row - skew, 16)
    limit = tl.minimum(n + skew, end)
    peak = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    spread = tl.zeros([LANES], tl.float32)
    # A softcap needs more registers, and its arithmetic hides the loads.
    GROUP: tl.constexpr = 1 if CAPPED else TILES
    SPAN: tl.constexpr = GROUP * LANES * VEC
    for start in range(begin, limit, SPAN):
        if (start >= skew) & (start + SPAN <= limit):
            peak, total, spread = scan_tiles(
                peak, total, spread, row, start, skew, limit, factor, softcap, LANES, GROUP, CAPPED, True
            )
        else:
            peak, total, spread = scan_tiles(
                peak, total, spread, row, start, skew, limit, factor, softcap, LANES, GROUP, CAPPED, False
            )
    return combine(peak, total, spread, factor)


@triton.jit
def load_ids(index, row, start, count, words, ignore_index, n, IDS: tl.constexpr):
    """(place of each id, id, whether it counts, whether it is also in range)"""
    k = start + tl.arange(0, IDS)
    place = row.to(tl.int64) * count + k
    ids = load_target(index, place, words, k < count)
    counted = (k < count) & (ids != ignore_index)
    return place, ids, counted, counted & (ids >= 0) & (ids < n)


@triton.jit
def has_ids(index, row, count, words, ignore_index, n, IDS: tl.constexpr):
    found = tl.zeros([IDS], tl.int32)
    for start in range(0, count, IDS):
        _, _, counted, _ = load_ids(index, row, start, count, words, ignore_index, n, IDS)
        found |= counted.to(tl.int32)
    return tl.max(found, axis=0) != 0


@triton.jit
def finish_row(
    log_probs, entropy, stats, chosen, x_row, index, row, n, count, words, ignore_index, peak, total, spread,
    inverse, softcap, flags, CAPPED: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """inverse: 1 / temperature"""
    log_total = tl.log(total)
    mean = tl.div_rn(spread * LN2, total)
    tl.store(entropy + row, log_total - mean, mask=(flags & WITH_ENTROPY) != 0)
    saved = (flags & WITH_GRAPH) != 0
    at = stats + row.to(tl.int64) * 3
    tl.store(at, peak, mask=saved)
    tl.store(at + 1, total, mask=saved)
    tl.store(at + 2, mean, mask=saved)
    for start in range(0, count, IDS):
        place, ids, counted, valid = load_ids(index, row, start, count, words, ignore_index, n, IDS)
        inside = place < (row.to(tl.int64) + 1) * count
        x = tl.load(x_row + ids, mask=valid, other=float("nan")).to(tl.float32)
        v = x
        if CAPPED:
            v, _ = softcapped(x, softcap)
        tl.store(log_probs + place, tl.where(counted, (v - peak) * inverse - log_total, 0.0), mask=inside)
        tl.store(chosen + place, tl.where(counted, x, 0.0), mask=inside & saved)


@triton.jit
def store_ignored(log_probs, entropy, stats, chosen, row, count, flags, IDS: tl.constexpr):
    tl.store(entropy + row, 0.0, mask=(flags & WITH_ENTROPY) != 0)
    saved = (flags & WITH_GRAPH) != 0
    for i in tl.static_range(3):
        tl.store(stats + row.to(tl.int64) * 3 + i, 0.0, mask=saved)
    for start in range(0, count, IDS):
        k = start + tl.arange(0, IDS)
        zeros = tl.zeros([IDS], tl.float32)
        tl.store(log_probs + row.to(tl.int64) * count + k, zeros, mask=k < count)
        tl.store(chosen + row.to(tl.int64) * count + k, zeros, mask=(k < count) & saved)


@triton.jit
def log_probs_fwd_kernel(
    log_probs, entropy, stats, chosen, shares, logits, index,
    n, part, inner_rows, count, logits_outer, logits_inner, index_words, ignore_index, factor, inverse, softcap, flags,
    CAPPED: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr, SKEWED: tl.constexpr, IDS: tl.constexpr,
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
    if has_ids(index, row, count, index_words, ignore_index, n, IDS):
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        peak, total, spread = scan_span(x_row, begin, end, n, factor, softcap, LANES, TILES, SKEWED, CAPPED)
        if part != 0:
            at = shares + tl.program_id(0).to(tl.int64) * 3
            tl.store(at, peak)
            tl.store(at + 1, total)
            tl.store(at + 2, spread)
        else:
            finish_row(
                log_probs, entropy, stats, chosen, x_row, index, row, n, count, index_words, ignore_index,
                peak, total, spread, inverse, softcap, flags, CAPPED, IDS,
            )  # fmt: skip
    elif part == 0:
        store_ignored(log_probs, entropy, stats, chosen, row, count, flags, IDS)


@triton.jit
def log_probs_combine_kernel(
    log_probs, entropy, stats, chosen, shares, logits, index,
    n, parts, inner_rows, count, logits_outer, logits_inner, index_words, ignore_index, factor, inverse, softcap, flags,
    CAPPED: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if has_ids(index, row, count, index_words, ignore_index, n, IDS):
        each = tl.arange(0, MOST_PARTS)
        at = shares + (row.to(tl.int64) * parts + each) * 3
        peak = tl.load(at, mask=each < parts, other=LOWEST)
        total = tl.load(at + 1, mask=each < parts, other=0.0)
        spread = tl.load(at + 2, mask=each < parts, other=0.0)
        peak, total, spread = combine(peak, total, spread, factor)
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        finish_row(
            log_probs, entropy, stats, chosen, x_row, index, row, n, count, index_words, ignore_index,
            peak, total, spread, inverse, softcap, flags, CAPPED, IDS,
        )  # fmt: skip
    else:
        store_ignored(log_probs, entropy, stats, chosen, row, count, flags, IDS)


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
def load_grads(grad, place, counted, valid, flags):
    g = tl.load(grad + place, mask=counted & ((flags & OF_LOG_PROBS) != 0), other=0.0)
    return tl.where(counted & (valid == 0), float("nan"), g)


@triton.jit
def log_probs_bwd_kernel(
    dlogits, logits, index, stats, chosen, grad, grad_entropy,
    n, inner_rows, count, dlogits_outer, dlogits_inner, logits_outer, logits_inner,
    index_words, ignore_index, factor, inverse, softcap, flags,
    CAPPED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, SKEWED: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    spans = tl.cdiv(columns_end(n, SKEWED), BLOCK_N * BLOCKS)
    row = tl.program_id(0) // spans
    begin = (tl.program_id(0) - row * spans) * (BLOCK_N * BLOCKS)
    end = tl.minimum(columns_end(n, SKEWED), begin + BLOCK_N * BLOCKS)
    out = dlogits + row_offset(row, inner_rows, dlogits_outer, dlogits_inner)
    found = tl.zeros([IDS], tl.int32)
    pulls = tl.zeros([IDS], tl.float32)
    for start in range(0, count, IDS):
        place, ids, counted, valid = load_ids(index, row, start, count, index_words, ignore_index, n, IDS)
        found |= counted.to(tl.int32)
        pulls += load_grads(grad, place, counted, valid, flags)
    if tl.max(found, axis=0) == 0:
        zero_span(out, begin, end, n, BLOCK_N, SKEWED)
    else:
        x_row = logits + row_offset(row, inner_rows, logits_outer, logits_inner)
        at = stats + row.to(tl.int64) * 3
        peak = tl.load(at)
        total = tl.load(at + 1)
        mean = tl.load(at + 2)
        h = tl.load(grad_entropy + row, mask=(flags & OF_ENTROPY) != 0, other=0.0)
        level = tl.div_rn((h * mean - tl.sum(pulls, axis=0)) * inverse, total)
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
                x = tl.load(tl.multiple_of(x_row - skew, 16) + cols).to(tl.float32)
                dx, slope = gradient_of(x, peak, factor, level, tilt, softcap, CAPPED)
                tl.store(tl.multiple_of(out - skew, 16) + cols, (dx * slope).to(out.dtype.element_ty))
            else:
                x = tl.load(x_row - skew + cols, mask=mask, other=0.0).to(tl.float32)
                dx, slope = gradient_of(x, peak, factor, level, tilt, softcap, CAPPED)
                tl.store(out - skew + cols, (dx * slope).to(out.dtype.element_ty), mask=mask)

        # The ids' gradients come last.
        tl.debug_barrier()
        for start in range(0, tl.where((flags & OF_LOG_PROBS) != 0, count, 0), IDS):
            place, ids, counted, valid = load_ids(index, row, start, count, index_words, ignore_index, n, IDS)
            # Equal ids store the same number.
            own = tl.zeros([IDS], tl.float32)
            for other in range(0, count, IDS):
                there, others, counts, exist = load_ids(index, row, other, count, index_words, ignore_index, n, IDS)
                g = load_grads(grad, there, counts, exist, flags)
                same = (ids[:, None] == others[None, :]) & exist[None, :]
                own += tl.sum(tl.where(same, g[None, :], 0.0), axis=1)
            x = tl.load(chosen + place, mask=valid, other=0.0)
            dx, slope = gradient_of(x, peak, factor, level, tilt, softcap, CAPPED)
            mine = valid & (ids + skew >= begin) & (ids + skew < end)
            tl.store(out + ids, ((dx + own * inverse) * slope).to(out.dtype.element_ty), mask=mine)


NO_LIMITS: dict = {}  # a config that serves every point of the axes
AT_A_TIME = dict(IDS=16)


def forward_config(max_n, lanes, tiles, aligned=True, only=NO_LIMITS):
    constexprs = dict(LANES=lanes, TILES=tiles, SKEWED=int(not aligned)) | AT_A_TIME
    return Config(max_n, aligned, lanes // 32, constexprs=constexprs, only=only)


def backward_config(max_n, block_n, num_warps, aligned=True):
    constexprs = dict(BLOCK_N=block_n, BLOCKS=1, SKEWED=int(not aligned)) | AT_A_TIME
    return Config(max_n, aligned, num_warps, constexprs=constexprs)


AXES = {"dtype": [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}], "form": [{"CAPPED": 0}, {"CAPPED": 1}]}
RESULTS = {
    "log_probs": "*fp32", "entropy": "*fp32", "stats": "*fp32", "chosen": "*fp32", "shares": "*fp32", "logits": "*X",
    "index": "*i32",
}  # fmt: skip
OPTIONS = {
    "index_words": "i32", "ignore_index": "i64", "factor": "fp32", "inverse": "fp32", "softcap": "fp32", "flags": "i32",
}  # fmt: skip

KERNELS = [
    Kernel(
        function=log_probs_fwd_kernel,
        args={
            **RESULTS, "n": "i32", "part": "i32", "inner_rows": "i32", "count": "i32",
            "logits_outer": "i64", "logits_inner": "i64", **OPTIONS,
        },
        aligned=["logits", "n", "part", "logits_outer", "logits_inner"],
        axes=AXES,
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
            "logits_outer": "i64", "logits_inner": "i64", **OPTIONS,
        },
        aligned=[],
        axes=AXES,
        configs=[Config(None, False, 4, constexprs=AT_A_TIME)],
    ),
    Kernel(
        function=log_probs_bwd_kernel,
        args={
            "dlogits": "*X", "logits": "*X", "index": "*i32", "stats": "*fp32", "chosen": "*fp32", "grad": "*fp32",
            "grad_entropy": "*fp32", "n": "i32", "inner_rows": "i32", "count": "i32",
            "dlogits_outer": "i64", "dlogits_inner": "i64", "logits_outer": "i64", "logits_inner": "i64", **OPTIONS,
        },
        aligned=["dlogits", "logits", "n", "dlogits_outer", "dlogits_inner", "logits_outer", "logits_inner"],
        axes=AXES,
        configs=[
            backward_config(1024, 1024, 1),
            backward_config(None, 4096, 4),
            backward_config(1024, 1024, 1, aligned=False),
            backward_config(None, 4096, 4, aligned=False),
        ],
    ),
]  # fmt: skip
