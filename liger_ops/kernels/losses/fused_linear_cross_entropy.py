"""Kernels of fused_linear_cross_entropy other than GEMMs and the kernels of cross_entropy.

The weight's gradient is a sum over chunks of tokens, rounded to 16 bits after each chunk. A token's contribution is
small in all rows except that of its true class, where the gradient of the logit is about -1. If that part were
included, a class that occurs a few times would lose digits with every later chunk. So the gradients of true logits are
removed before the GEMMs (`take_targets`) and added at the end, class by class (`order_targets`), in fp32 and rounded
once (`add_targets`). The remaining sums are small, and so are their rounding errors.

Targets are int32 words, two per int64.
"""

import triton
import triton.language as tl

from ..table import Config, Kernel
from ._rows import load_target


@triton.jit
def fused_linear_cross_entropy_take_targets_kernel(
    dlogits, target, taken, rows, n, stride, target_words, ignore_index, first_class,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves the gradient of every row's true logit from dlogits (rows, n) to `taken`; 0 for a row without a target.
    first_class: the class of the first column."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    y = load_target(target, row, target_words, inside)
    counted = inside & (y != ignore_index)
    y -= first_class
    known = counted & (y >= 0) & (y < n)
    at = dlogits + row.to(tl.int64) * stride + y
    tl.store(taken + row, tl.load(at, mask=known, other=0.0).to(tl.float32), mask=inside)
    tl.store(at, tl.zeros([BLOCK], dlogits.dtype.element_ty), mask=known)


@triton.jit
def class_of(target, row, rows, n, ignore_index, first_class, WORDS: tl.constexpr):
    """The class of a row, counted from first_class, in 32 bits; -1 if it is not one of n classes; n beyond the last
    row."""
    y = load_target(target, row, WORDS, row < rows)
    counted = y != ignore_index
    y -= first_class
    known = counted & (y >= 0) & (y < n)
    return tl.where(row < rows, tl.where(known, y, -1), n).to(tl.int32)


@triton.jit
def fused_linear_cross_entropy_order_targets_kernel(
    target, classes, order, rows, n, ignore_index, first_class,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """classes: the classes of all rows in ascending order, -1 for none; order: the row of each entry. Rows of equal
    class keep their order.

    The place of a row is the number of rows before it, found by rows^2 comparisons. For 8192 rows this is fast, and
    needs one launch; a sort needs about twenty dependent launches. For very many rows the host sorts instead.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = class_of(target, row, rows, n, ignore_index, first_class, WORDS)
    own = tl.program_id(0) * BLOCK // BLOCK_N * BLOCK_N
    # Counts in fp32 are exact up to 2^24 rows and take two instructions per pair; integers take more.
    before = tl.zeros([BLOCK, BLOCK_N], tl.float32)
    for first in range(0, rows, BLOCK_N):
        theirs = class_of(target, first + tl.arange(0, BLOCK_N), rows, n, ignore_index, first_class, WORDS)
        # In tiles before the program's own, rows of equal class come first too.
        theirs -= (first < own).to(tl.int32)
        before = tl.where(theirs[None, :] < mine[:, None], before + 1, before)
    other = own + tl.arange(0, BLOCK_N)
    theirs = class_of(target, other, rows, n, ignore_index, first_class, WORDS)
    tied = (theirs[None, :] == mine[:, None]) & (other[None, :] < row[:, None])
    place = tl.sum(tl.where(tied, before + 1, before), axis=1).to(tl.int32)
    tl.store(classes + place, mine, mask=row < rows)
    tl.store(order + place, row, mask=row < rows)


@triton.jit
def fused_linear_cross_entropy_add_targets_kernel(
    dweight, x, taken, classes, order, rows, columns, dweight_row, dweight_column, x_row, scale,
    UNIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dweight[c] += scale * sum of taken[m] * x[m] over the rows m whose class is c.

    classes, order: see order_targets. The program at the first row of a class adds all rows of the class, for BLOCK_N
    columns.
    """
    blocks = tl.cdiv(columns, BLOCK_N)
    start = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - start * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.load(classes + start)
    before = tl.load(classes + start - 1, mask=start > 0, other=-1)
    first = tl.load(order + start)
    if (mine != before) & (mine >= 0):
        out = dweight + mine * dweight_row + cols.to(tl.int64) * (1 if UNIT else dweight_column)
        # Loads while the sum is computed.
        so_far = tl.load(out, mask=cols < columns, other=0.0)
        # Most classes have one row. For other classes, the indices of a block of rows are loaded one block ahead.
        total = tl.load(x + first * x_row + cols, mask=cols < columns, other=0.0).to(tl.float32) * tl.load(
            taken + first
        )
        at = start + 1 + tl.arange(0, BLOCK_M)
        same = tl.load(classes + at, mask=at < rows, other=-1) == mine
        row = tl.load(order + at, mask=at < rows, other=0)
        start += 1
        while tl.load(classes + start, mask=start < rows, other=-1) == mine:
            factor = tl.load(taken + row, mask=same, other=0.0)
            inside = same[:, None] & (cols < columns)[None, :]
            tile = tl.load(x + row[:, None] * x_row + cols[None, :], mask=inside, other=0.0)
            at += BLOCK_M
            same = tl.load(classes + at, mask=at < rows, other=-1) == mine
            row = tl.load(order + at, mask=at < rows, other=0)
            start += BLOCK_M
            total += tl.sum(tile.to(tl.float32) * factor[:, None], axis=0)
        total = so_far.to(tl.float32) + scale * total
        tl.store(out, total.to(dweight.dtype.element_ty), mask=cols < columns)


HALVES = {"dtype": [{"X": "bf16"}, {"X": "fp16"}]}


def add_config(aligned, block_n):
    constexprs = dict(UNIT=int(aligned), BLOCK_N=block_n, BLOCK_M=8)
    return Config(None, aligned, 4, constexprs=constexprs)


KERNELS = [
    Kernel(
        function=fused_linear_cross_entropy_take_targets_kernel,
        args={
            "dlogits": "*X", "target": "*i32", "taken": "*fp32", "rows": "i32", "n": "i32", "stride": "i64",
            "target_words": "i32", "ignore_index": "i64", "first_class": "i32",
        },
        aligned=[],
        axes=HALVES,
        configs=[Config(None, False, 1, constexprs=dict(BLOCK=32))],
    ),
    Kernel(
        function=fused_linear_cross_entropy_order_targets_kernel,
        args={
            "target": "*i32", "classes": "*i32", "order": "*i32", "rows": "i32", "n": "i32", "ignore_index": "i64",
            "first_class": "i32",
        },
        aligned=[],
        axes={"words": [{"WORDS": 1}, {"WORDS": 2}]},
        # Few enough rows per program to occupy every multiprocessor with 8192 rows.
        configs=[Config(None, False, 8, constexprs=dict(BLOCK=32, BLOCK_N=512))],
    ),
    Kernel(
        function=fused_linear_cross_entropy_add_targets_kernel,
        args={
            "dweight": "*X", "x": "*X", "taken": "*fp32", "classes": "*i32", "order": "*i32",
            "rows": "i32", "columns": "i32", "dweight_row": "i64", "dweight_column": "i64", "x_row": "i64",
            "scale": "fp32",
        },
        aligned=["dweight", "x", "columns", "dweight_row", "x_row"],
        axes=HALVES,
        configs=[add_config(aligned=True, block_n=1024), add_config(aligned=False, block_n=256)],
    ),
]  # fmt: skip
