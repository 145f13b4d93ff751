"""From numbers of rows to the results of a cross entropy: the facts of processes that split the classes become the losses
and metrics of rows, and those of all rows are added up. Names and flags are those of cross_entropy.py."""

import triton
import triton.language as tl

from ..functions import log1p
from ..table import Config, Kernel
from ._flags import (
    COUNT_ONLY,
    FROM_PARTIAL,
    HAS_SMOOTHING,
    HAS_TOTALS,
    HAS_WEIGHT,
    LOWEST,
    MEAN,
    SAVE_ENTROPY,
    SAVE_METRICS,
    SAVE_STATS,
    SAVE_TOTALS,
    SAVE_Z_LOSS,
    TO_PARTIAL,
)
from ._rows import exp, load_target, load_weight, store_row


@triton.jit
def cross_entropy_combine_kernel(
    loss, z_loss, accuracy, predicted, stats, log_prob, entropy, gathered, target, weight, rank_weights,
    rows, ranks, classes, ignore_index, label_smoothing, lse_square_scale, flags,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses, metrics and statistics of rows whose classes are split over processes. gathered: (ranks, facts, rows), see
    store_facts; with SAVE_ENTROPY, the last fact is the entropy of the process's own classes. rank_weights: the sum of
    class weights of each process. All processes compute the same bits."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    y = load_target(target, row, WORDS, inside)
    counted = inside & (y != ignore_index)
    is_class = (y >= 0) & (y < classes)
    stride = rows.to(tl.int64)
    smooths = (flags & HAS_SMOOTHING) != 0
    metrics = (flags & SAVE_METRICS) != 0
    describes = (flags & SAVE_ENTROPY) != 0
    facts = 3 + smooths.to(tl.int64) + 2 * metrics.to(tl.int64) + describes.to(tl.int64)
    ALL: tl.constexpr = tl.PropagateNan.ALL
    top = tl.full([BLOCK], LOWEST, tl.float32)
    true = tl.full([BLOCK], float("-inf"), tl.float32)
    for rank in range(ranks):
        at = gathered + rank * facts * stride + row
        top = tl.maximum(top, tl.load(at, mask=counted, other=LOWEST))
        true = tl.maximum(true, tl.load(at + 2 * stride, mask=counted, other=float("-inf")), propagate_nan=ALL)
    true = tl.where(is_class, true, float("nan"))
    others = tl.zeros([BLOCK], tl.float32)
    for rank in range(ranks):
        at = gathered + rank * facts * stride + row
        base = tl.load(at, mask=counted, other=LOWEST)
        others += tl.load(at + stride, mask=counted, other=0.0) * exp(base - top, tl.float32)
    total = exp(true - top, tl.float32) + others
    log_total = tl.log(total)
    nll = tl.where(counted, top - true + tl.where(true == top, log1p(others), log_total), 0.0)
    lse = top + log_total
    row_z_loss = tl.where(counted, lse_square_scale * lse * lse, 0.0)
    w_y = load_weight(weight, y, counted & is_class, flags)
    row_loss = w_y * nll
    if smooths:
        smooth = tl.zeros([BLOCK], tl.float32)
        for rank in range(ranks):
            at = gathered + rank * facts * stride + row
            w = tl.load(rank_weights + rank)
            level = top - tl.load(at, mask=counted, other=0.0) + log_total
            tilt = tl.load(at + 3 * stride, mask=counted, other=0.0)
            smooth += tl.where(w == 0, 0.0, w * level) - tilt
        row_loss = (1 - label_smoothing) * row_loss + label_smoothing / classes * smooth
        row_loss = tl.where(counted, row_loss, 0.0)
    best = tl.full([BLOCK], -1, tl.int32)
    if metrics:
        highest = tl.full([BLOCK], float("-inf"), tl.float32)
        for rank in range(ranks):
            at = gathered + (rank * facts + 3 + smooths.to(tl.int64)) * stride + row
            value = tl.load(at, mask=counted, other=float("-inf"))
            here = tl.load(at + stride, mask=counted, other=0.0).to(tl.int32, bitcast=True)
            best = tl.where(counted & ((rank == 0) | (value > highest)), here, best)
            highest = tl.maximum(highest, value)
    store_row(loss, z_loss, accuracy, predicted, row, row_loss, row_z_loss, best, y, inside, flags)
    save = inside & ((flags & SAVE_STATS) != 0)
    tl.store(stats + row, top, mask=save)
    tl.store(stats + stride + row, total, mask=save)
    tl.store(stats + 2 * stride + row, tl.div_rn(others, total), mask=save)
    if describes:
        spread = tl.zeros([BLOCK], tl.float32)
        for rank in range(ranks):
            at = gathered + rank * facts * stride + row
            base = tl.load(at, mask=counted, other=LOWEST)
            own = tl.load(at + 2 * stride, mask=counted, other=float("-inf"))
            sum_here = tl.load(at + stride, mask=counted, other=0.0) + exp(own - base, tl.float32)
            p = sum_here * exp(base - top, tl.float32) / total
            inner = tl.load(at + (facts - 1) * stride, mask=counted, other=0.0)
            spread += tl.where(p == 0, 0.0, p * (inner - tl.log(p)))
        tl.store(log_prob + row, -nll, mask=inside)
        tl.store(entropy + row, tl.where(counted, spread, 0.0), mask=inside)


@triton.jit
def add_five(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def cross_entropy_sum_kernel(
    loss_out, z_loss_out, accuracy_out, totals, partial, loss, z_loss, accuracy, target, weight,
    rows, n, ignore_index, flags,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up losses and metrics of all rows in a fixed order: few of them per lane in fp32, then the lanes in fp64.

    One program does this. For very many rows, several programs store `partial` sums of 5 numbers for a second launch. A
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
            # Rows without a target have stored zeros, so these loads need not wait for the targets.
            sum_loss += tl.load(loss + row, mask=inside & ((flags & COUNT_ONLY) == 0), other=0.0)
            sum_z += tl.load(z_loss + row, mask=inside & ((flags & SAVE_Z_LOSS) != 0), other=0.0)
            sum_right += tl.load(accuracy + row, mask=inside & ((flags & SAVE_METRICS) != 0), other=0.0)
            # Compared word by word, because 64-bit comparisons take as long as the loads.
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
            # Without any target, 0 / 0 is NaN, as in PyTorch.
            all_loss /= all_weight
            all_z /= all_count
            all_right /= all_count
        tl.store(loss_out, all_loss + all_z, mask=(flags & COUNT_ONLY) == 0)
        tl.store(z_loss_out, all_z, mask=(flags & SAVE_METRICS) != 0)
        tl.store(accuracy_out, all_right, mask=(flags & SAVE_METRICS) != 0)


KERNELS = [
    Kernel(
        function=cross_entropy_combine_kernel,
        args={
            "loss": "*fp32", "z_loss": "*fp32", "accuracy": "*fp32", "predicted": "*i64", "stats": "*fp32",
            "log_prob": "*fp32", "entropy": "*fp32", "gathered": "*fp32", "target": "*i32", "weight": "*fp32",
            "rank_weights": "*fp32", "rows": "i32", "ranks": "i32", "classes": "i32", "ignore_index": "i64",
            "label_smoothing": "fp32", "lse_square_scale": "fp32", "flags": "i32",
        },
        aligned=[],
        axes={"words": [{"WORDS": 1}, {"WORDS": 2}]},
        configs=[Config(None, False, 4, constexprs=dict(BLOCK=128))],
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
