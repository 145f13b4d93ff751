"""What fused_linear_cross_entropy does beside matrix products and the rows of cross_entropy.

The weight's gradient is a sum over chunks of tokens, rounded to 16 bits after each. Most of what a token adds to it is
small, but for one row: that of its true class, which the gradient of its logit, about -1, multiplies. Rounded with
these, a class that occurs a few times would lose digits at every later chunk. So the gradients of true logits are
taken out of the products (`take_targets`) and added at the end, in fp32 and rounded once (`add_targets`), class by class
(`order_targets`). What is left in the sums is small, and so is what rounding costs it.

Targets are int32 words, two for an int64.
"""

import triton
import triton.language as tl

from ..table import Config, Kernel
from ._rows import load_target


@triton.jit
def fused_linear_cross_entropy_take_targets_kernel(
    dlogits, target, taken, rows, n, stride, target_words, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves the gradient of every row's true logit out of dlogits (rows, n); 0 for a row without one."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    y = load_target(target, row, target_words, inside)
    known = inside & (y != ignore_index) & (y >= 0) & (y < n)
    at = dlogits + row.to(tl.int64) * stride + y
    tl.store(taken + row, tl.load(at, mask=known, other=0.0).to(tl.float32), mask=inside)
    tl.store(at, tl.zeros([BLOCK], dlogits.dtype.element_ty), mask=known)


@triton.jit
def class_of(target, row, rows, n, ignore_index, WORDS: tl.constexpr):
    """-1 where a row has no class: such rows are alike, and 32 bits hold what is left. n where there is no row."""
    y = load_target(target, row, WORDS, row < rows)
    known = (y != ignore_index) & (y >= 0) & (y < n)
    return tl.where(row < rows, tl.where(known, y, -1), n).to(tl.int32)


@triton.jit
def fused_linear_cross_entropy_order_targets_kernel(
    target, classes, order, rows, n, ignore_index,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """classes: those of all rows in ascending order, -1 for none; order: the row that each belongs to. Equal ones stay in
    their order.

    A row's place is how many come before it, which takes rows^2 comparisons. 67 million of them, for 8192 rows, are little
    for a whole device, in one launch; a sort is some twenty that wait for each other. What this costs grows with the
    square of rows, the products around it only with rows: the host sorts where there are very many.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = class_of(target, row, rows, n, ignore_index, WORDS)
    own = tl.program_id(0) * BLOCK // BLOCK_N * BLOCK_N
    # Two instructions a pair: in fp32, exact for 2^24 rows, where integers take more, and added up across threads last.
    before = tl.zeros([BLOCK, BLOCK_N], tl.float32)
    for first in range(0, rows, BLOCK_N):
        theirs = class_of(target, first + tl.arange(0, BLOCK_N), rows, n, ignore_index, WORDS)
        # Of tiles ahead of a program's own, equal classes come first too.
        theirs -= (first < own).to(tl.int32)
        before = tl.where(theirs[None, :] < mine[:, None], before + 1, before)
    other = own + tl.arange(0, BLOCK_N)
    theirs = class_of(target, other, rows, n, ignore_index, WORDS)
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

    classes, order: see order_targets. One program adds all rows of a class for BLOCK_N columns; it starts where the class
    does.
    """
    blocks = tl.cdiv(columns, BLOCK_N)
    start = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - start * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.load(classes + start)
    before = tl.load(classes + start - 1, mask=start > 0, other=-1)
    first = tl.load(order + start)
    if (mine != before) & (mine >= 0):
        out = dweight + mine * dweight_row + cols.to(tl.int64) * (1 if UNIT else dweight_column)
        # On its way while the sum is made.
        so_far = tl.load(out, mask=cols < columns, other=0.0)
        # Most classes are those of one row. Of others, what names a block of rows is asked for a block ahead.
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
            "target_words": "i32", "ignore_index": "i64",
        },
        aligned=[],
        axes=HALVES,
        configs=[Config(None, False, 1, constexprs=dict(BLOCK=32))],
    ),
    Kernel(
        function=fused_linear_cross_entropy_order_targets_kernel,
        args={
            "target": "*i32", "classes": "*i32", "order": "*i32", "rows": "i32", "n": "i32", "ignore_index": "i64",
        },
        aligned=[],
        axes={"words": [{"WORDS": 1}, {"WORDS": 2}]},
        # As many rows a program as leave some for every multiprocessor, of 8192 or more.
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
        # us on an H200 for 16384 tokens of 4096 columns in bf16: 151 where hardly two are of a class, 203 where classes are as
        # frequent as words (131 and 278 with blocks of 4 rows, 116 and 397 with blocks of 2).
        configs=[add_config(aligned=True, block_n=1024), add_config(aligned=False, block_n=256)],
    ),
]  # fmt: skip
