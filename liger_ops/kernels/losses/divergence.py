"""Divergences of the distributions in the rows of two tensors, elementwise. x: input, t: target, p and q: the
probabilities of t and x, m = beta p + (1 - beta) q.

    kind      loss                                  d loss / d x          used by
    PROBS     t (log max(t, eps) - x)               -t                    kl_div
    LOG_PROBS exp(t) (t - x)                        -exp(t)               kl_div(log_target=True)
    FORWARD   p (log p - log q)                     -p                    jsd(beta=0)
    REVERSE   q (log q - log p)                     q (log q - log p + 1) jsd(beta=1)
    MIXTURE   beta p (log p - log m)                (1 - beta) q          jsd
              + (1 - beta) q (log q - log m)        (log q - log m)
    TOTAL     |x - t| / 2                           sign(x - t) / 2       tvd

In the kinds of jsd, a probability of zero, which is -inf in x or t, contributes zero.

Forward reads both tensors once. REDUCED = 1 adds up the losses of a program's span; `sum` then adds up the partial sums
of all programs in a fixed order. Backward reads the tensors that the gradient depends on, and may overwrite the target.

A program processes BLOCKS tiles of BLOCK_M rows by BLOCK_N columns. Contiguous tensors are passed as one row of `total`
elements (ONE_ROW), so that odd rows are as fast as aligned ones. A label then counts for `columns` elements. No tile is
longer, so that it contains the end of at most one such part.

A row whose label is ignore_index is not read: its losses and gradients are 0. Labels are int32 words, two per int64;
label_words is 0 without labels.
"""

import triton
import triton.language as tl

from ..elements import DTYPES
from ..rows import LOG2E, block_rows, row_offset, strides
from ..table import Config, Kernel
from ._flags import LN2, LOG2E_TAIL
from ._rows import load_target

PROBS = tl.constexpr(0)
LOG_PROBS = tl.constexpr(1)
FORWARD = tl.constexpr(2)
REVERSE = tl.constexpr(3)
MIXTURE = tl.constexpr(4)
TOTAL = tl.constexpr(5)

# exp is 0 below this, in fp64 too.
NO_PROBABILITY = tl.constexpr(-1000)
# Flags of `sum`.
SAVES_DIVISOR = tl.constexpr(1)
DIVIDES = tl.constexpr(2)
MOST_TILE = tl.constexpr(2048)  # most columns of a tile


@triton.jit
def exp(x, DTYPE: tl.constexpr):
    """exp(x). For fp32 rows it corrects the rounding of the exponent; 16-bit rows do not need this, and the arithmetic
    would take longer than their memory traffic."""
    if DTYPE.primitive_bitwidth < 32:
        e = tl.exp2(x * LOG2E)
    else:
        x = tl.maximum(x, NO_PROBABILITY, propagate_nan=tl.PropagateNan.ALL)
        power = x * LOG2E
        e = tl.exp2(power)
        e = tl.where(e < float("inf"), e + e * ((tl.fma(x, LOG2E, -power) + x * LOG2E_TAIL) * LN2), e)
    return e


@triton.jit
def log(x, DTYPE: tl.constexpr):
    if DTYPE.primitive_bitwidth < 32:
        # The result is declared as an integer for the tests' interpreter.
        bits = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
        y = bits.to(tl.float32, bitcast=True) * LN2
    else:
        y = tl.log(x)
    return y


@triton.jit
def mixture(x, t, beta, DTYPE: tl.constexpr):
    """The terms beta p (log p - log m) and (1 - beta) q (log q - log m), first that of the larger of p and q, and whether
    this is p."""
    x = tl.maximum(x, NO_PROBABILITY, propagate_nan=tl.PropagateNan.ALL)
    t = tl.maximum(t, NO_PROBABILITY, propagate_nan=tl.PropagateNan.ALL)
    # Relative to the larger of the two, so that m does not underflow.
    top = tl.maximum(x, t, propagate_nan=tl.PropagateNan.ALL)
    gap = tl.minimum(x, t) - top
    share = tl.where(t >= x, beta, 1 - beta)
    of_low = (1 - share) * exp(gap, DTYPE)
    log_m = log(share + of_low, DTYPE)
    probability = exp(top, DTYPE)
    high = -probability * share * log_m
    low = probability * of_low * (gap - log_m)
    return high, low, t >= x


@triton.jit
def losses_of(x, t, kind, parameter, DTYPE: tl.constexpr):
    """parameter: eps of PROBS, beta of MIXTURE"""
    if kind == PROBS:
        loss = t * (tl.where(t == 0, 0.0, log(tl.maximum(t, parameter), DTYPE)) - x)
    elif kind == LOG_PROBS:
        loss = exp(t, DTYPE) * (t - x)
    elif kind == FORWARD:
        p = exp(t, DTYPE)
        loss = tl.where(p == 0, 0.0, p * (t - x))
    elif kind == REVERSE:
        q = exp(x, DTYPE)
        loss = tl.where(q == 0, 0.0, q * (x - t))
    elif kind == MIXTURE:
        high, low, _ = mixture(x, t, parameter, DTYPE)
        loss = high + low
    else:
        loss = 0.5 * tl.abs(x - t)
    return loss


@triton.jit
def slopes_of(x, t, kind, parameter, DTYPE: tl.constexpr):
    """The losses' derivatives. Those of PROBS, LOG_PROBS and FORWARD do not depend on x."""
    if kind == PROBS:
        slope = -t
    elif (kind == LOG_PROBS) | (kind == FORWARD):
        slope = -exp(t, DTYPE)
    elif kind == REVERSE:
        q = exp(x, DTYPE)
        slope = tl.where(q == 0, 0.0, q * (x - t) + q)
    elif kind == MIXTURE:
        high, low, p_is_larger = mixture(x, t, parameter, DTYPE)
        slope = tl.where(p_is_larger, low, high)
    else:
        slope = tl.where(x > t, 0.5, tl.where(x < t, -0.5, 0.0))
    return slope


@triton.jit
def is_counted(labels, row, words, ignore_index, mask):
    return (words == 0) | (load_target(labels, row, words, mask & (words != 0)) != ignore_index)


@triton.jit
def program_span(rows, n, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr):
    """(rows, first column) of this program. Only the column is 64-bit."""
    program = tl.program_id(0)
    if ONE_ROW:
        row = 0  # of one
        start = program.to(tl.int64) * SPAN
    else:
        spans = tl.cdiv(n, SPAN).to(tl.int32)
        block = program // spans
        start = (program - block * spans).to(tl.int64) * SPAN
        row = block_rows(block, BLOCK_M)
    return row, start


@triton.jit
def row_at(base, row, start, inner_rows, outer, inner, ONE_ROW: tl.constexpr):
    if ONE_ROW:
        at = base + start
    else:
        at = base + row_offset(row, inner_rows, outer, inner) + start
    return at


@triton.jit
def first_label(start, columns):
    """(label, columns left of its part) at a column of one long row."""
    label = start // tl.maximum(columns, 1)
    return label.to(tl.int32), ((label + 1) * columns - start).to(tl.int32)


@triton.jit
def next_label(label, left, columns, BLOCK_N: tl.constexpr):
    """first_label one tile later."""
    left -= BLOCK_N
    ends = left <= 0
    return tl.where(ends, label + 1, label), tl.where(ends, left + columns, left)


@triton.jit
def read_mask(
    inside,
    full,
    counted,
    labels,
    label,
    left,
    all_rows,
    words,
    ignore_index,
    ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(elements of a tile to read, whether these are all). full: all columns are inside."""
    whole = False
    if ONE_ROW:
        here = is_counted(labels, label, words, ignore_index, label < all_rows)
        there = is_counted(labels, label + 1, words, ignore_index, label + 1 < all_rows)
        read = inside & tl.where(tl.arange(0, BLOCK_N)[None, :] < left, here, there)
        whole = full & here & (there | (left >= BLOCK_N))
        if words == 0:
            read = inside
            whole = full
    else:
        read = inside & counted
        if BLOCK_M == 1:
            whole = full & counted
    return read, whole


@triton.jit
def load_tile(pointers, mask, whole):
    """In fp32. whole: nothing is masked. Such a load can be as wide as its alignment permits."""
    if whole:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def store_tile(pointers, values, mask, whole):
    values = values.to(pointers.dtype.element_ty)
    if whole:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def divergence_fwd_kernel(
    loss, input, target, labels,
    rows, n, total, inner_rows, all_rows, columns, loss_outer, loss_inner, input_outer, input_inner,
    target_outer, target_inner, label_words, ignore_index, kind, parameter,
    REDUCED: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """loss: like the input, or, if REDUCED, one sum for each program. columns: length of the rows that labels count;
    all_rows: their number."""
    row, start = program_span(rows, n, ONE_ROW, BLOCK_M, BLOCK_N * BLOCKS)
    width = total if ONE_ROW else n
    present = row < rows
    counted = present
    label = 0
    left = 0
    if ONE_ROW:
        label, left = first_label(start, columns)
    else:
        counted = present & is_counted(labels, row, label_words, ignore_index, present)
    x_at = row_at(input, row, start, inner_rows, input_outer, input_inner, ONE_ROW)
    t_at = row_at(target, row, start, inner_rows, target_outer, target_inner, ONE_ROW)
    if not REDUCED:
        out = row_at(loss, row, start, inner_rows, loss_outer, loss_inner, ONE_ROW)
    end = tl.minimum(width - start, BLOCK_N * BLOCKS).to(tl.int32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, end, BLOCK_N):
        cols = (first + tl.arange(0, BLOCK_N))[None, :]
        inside = present & (cols < end)
        full = (first + BLOCK_N <= end) & (row < rows) if BLOCK_M == 1 else False
        read, whole = read_mask(
            inside, full, counted, labels, label, left, all_rows, label_words, ignore_index, ONE_ROW, BLOCK_M, BLOCK_N
        )
        if ONE_ROW:
            label, left = next_label(label, left, columns, BLOCK_N)
        x = load_tile(x_at + cols, read, whole)
        t = load_tile(t_at + cols, read, whole)
        losses = tl.where(read, losses_of(x, t, kind, parameter, input.dtype.element_ty), 0.0)
        if REDUCED:
            sums += losses
        else:
            store_tile(out + cols, losses, inside, full)
    if REDUCED:
        tl.store(loss + tl.program_id(0), tl.sum(sums))


@triton.jit
def divergence_bwd_kernel(
    dinput, grad, divisor, input, target, labels,
    rows, n, total, inner_rows, all_rows, columns, dinput_outer, dinput_inner, grad_outer, grad_inner,
    input_outer, input_inner, target_outer, target_inner, label_words, ignore_index, kind, parameter, has_divisor,
    REDUCED: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """grad: like the input, or, if REDUCED, one number. dinput may be the target."""
    row, start = program_span(rows, n, ONE_ROW, BLOCK_M, BLOCK_N * BLOCKS)
    width = total if ONE_ROW else n
    present = row < rows
    counted = present
    label = 0
    left = 0
    if ONE_ROW:
        label, left = first_label(start, columns)
    else:
        counted = present & is_counted(labels, row, label_words, ignore_index, present)
    x_at = row_at(input, row, start, inner_rows, input_outer, input_inner, ONE_ROW)
    t_at = row_at(target, row, start, inner_rows, target_outer, target_inner, ONE_ROW)
    out = row_at(dinput, row, start, inner_rows, dinput_outer, dinput_inner, ONE_ROW)
    if REDUCED:
        scale = tl.load(grad)
        if has_divisor != 0:
            scale = tl.div_rn(scale, tl.load(divisor))
    else:
        g_at = row_at(grad, row, start, inner_rows, grad_outer, grad_inner, ONE_ROW)
    end = tl.minimum(width - start, BLOCK_N * BLOCKS).to(tl.int32)
    for first in range(0, end, BLOCK_N):
        cols = (first + tl.arange(0, BLOCK_N))[None, :]
        inside = present & (cols < end)
        full = (first + BLOCK_N <= end) & (row < rows) if BLOCK_M == 1 else False
        read, whole = read_mask(
            inside, full, counted, labels, label, left, all_rows, label_words, ignore_index, ONE_ROW, BLOCK_M, BLOCK_N
        )
        if ONE_ROW:
            label, left = next_label(label, left, columns, BLOCK_N)
        t = load_tile(t_at + cols, read, whole)
        x = t
        if kind >= REVERSE:
            x = load_tile(x_at + cols, read, whole)
        slopes = slopes_of(x, t, kind, parameter, target.dtype.element_ty)
        if REDUCED:
            slopes *= scale
        else:
            slopes *= load_tile(g_at + cols, read, whole)
        store_tile(out + cols, tl.where(read, slopes, 0.0), inside, full)


@triton.jit
def divergence_sum_kernel(
    loss, divisor, partial, labels, programs, rows, fixed, label_words, ignore_index, flags,
    LABELLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss = sum of `partial`, and / divisor if DIVIDES. The divisor is `fixed`, times the number of rows that count if
    LABELLED. One program adds up few numbers per lane in fp32, then the lanes in fp64."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, programs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial + at, mask=at < programs, other=0.0)
    by = fixed.to(tl.float64)
    if LABELLED:
        count = tl.zeros([BLOCK], tl.float32)
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            counts = (row < rows) & is_counted(labels, row, label_words, ignore_index, row < rows)
            count += tl.where(counts, 1.0, 0.0)
        by *= tl.sum(count.to(tl.float64))
    loss_here = tl.sum(total.to(tl.float64)).to(tl.float32)
    by = by.to(tl.float32)
    if flags & DIVIDES:
        # Without any row, 0 / 0 is NaN, as in PyTorch.
        loss_here = tl.div_rn(loss_here, by)
    tl.store(loss, loss_here)
    tl.store(divisor, by, mask=(flags & SAVES_DIVISOR) != 0)


def config(max_n, block_m, block_n, blocks, num_warps, aligned=True, one_row=False):
    assert block_n <= MOST_TILE.value
    constexprs = dict(ONE_ROW=int(one_row), BLOCK_M=block_m, BLOCK_N=block_n, BLOCKS=blocks)
    return Config(max_n, aligned, num_warps, constexprs=constexprs, max_rows=1 if one_row else None)


def configs(block_n, blocks, num_warps):
    """block_n, blocks, num_warps: for long, aligned rows."""
    return [
        config(None, 1, block_n, blocks, num_warps, one_row=True),
        config(256, 4, 256, 1, 4),
        config(None, 1, block_n, blocks, num_warps),
        config(None, 1, 1024, 8, 4, aligned=False, one_row=True),
        config(None, 1, 1024, 8, 4, aligned=False),
    ]


SIZES = {"rows": "i32", "n": "i64", "total": "i64", "inner_rows": "i32", "all_rows": "i32", "columns": "i32"}
LABELS = {"label_words": "i32", "ignore_index": "i64", "kind": "i32", "parameter": "fp32"}
AXES = {"dtype": DTYPES, "form": [{"REDUCED": 1}, {"REDUCED": 0}]}


KERNELS = [
    Kernel(
        function=divergence_fwd_kernel,
        args={
            "loss": "*fp32", "input": "*X", "target": "*X", "labels": "*i32", **SIZES,
            **strides("loss", "input", "target"), **LABELS,
        },
        aligned=["loss", "input", "target", "n", *strides("loss", "input", "target")],
        axes=AXES,
        configs=configs(2048, 16, 8),
    ),
    Kernel(
        function=divergence_bwd_kernel,
        args={
            "dinput": "*X", "grad": "*fp32", "divisor": "*fp32", "input": "*X", "target": "*X", "labels": "*i32", **SIZES,
            **strides("dinput", "grad", "input", "target"), **LABELS, "has_divisor": "i32",
        },
        aligned=["dinput", "grad", "input", "target", "n", *strides("dinput", "grad", "input", "target")],
        axes=AXES,
        configs=configs(1024, 16, 4),
    ),
    Kernel(
        function=divergence_sum_kernel,
        args={
            "loss": "*fp32", "divisor": "*fp32", "partial": "*fp32", "labels": "*i32", "programs": "i32", "rows": "i32",
            "fixed": "i64", "label_words": "i32", "ignore_index": "i64", "flags": "i32",
        },
        aligned=[],
        axes={"labels": [{"LABELLED": 0}, {"LABELLED": 1}]},
        configs=[
            Config(None, False, 4, constexprs=dict(BLOCK=1024), max_rows=1024),
            Config(None, False, 32, constexprs=dict(BLOCK=4096)),
        ],
    ),
]  # fmt: skip
