"""What fused_linear_cross_entropy does beside matrix products and the rows of cross_entropy.

The weight's gradient is a sum over chunks of tokens, rounded to 16 bits after each. Most of what a token adds to it is
small, but for one row: that of its true class, which the gradient of its logit, about -1, multiplies. Rounded with
these, a class that occurs a few times would lose digits at every later chunk. So the gradients of true logits are
taken out of the products (`take_targets`) and added at the end, in fp32 and rounded once (`add_targets`). What is left
in the sums is small, and so is what rounding costs it.

Targets are int32 words, two for an int64.
"""

import triton
import triton.language as tl

from .cross_entropy import load_target
from .table import Config, Kernel


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
def fused_linear_cross_entropy_add_targets_kernel(
    dweight, x, taken, classes, order, rows, n, columns, dweight_row, dweight_column, x_row, ignore_index, scale,
    UNIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dweight[c] += scale * sum of taken[m] * x[m] over the rows m whose class is c.

    classes: targets in ascending order, order: the row that each belongs to. One program adds all rows of a class for
    BLOCK_N columns; it starts where the class does.
    """
    blocks = tl.cdiv(columns, BLOCK_N)
    start = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - start * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.load(classes + start)
    before = tl.load(classes + start - 1, mask=start > 0, other=-1)
    if (mine != before) & (mine != ignore_index) & (mine >= 0) & (mine < n):
        total = tl.zeros([BLOCK_N], tl.float32)
        last = mine
        while (last == mine) & (start < rows):
            at = start + tl.arange(0, BLOCK_M)
            same = tl.load(classes + at, mask=at < rows, other=-1) == mine
            row = tl.load(order + at, mask=same, other=0)
            factor = tl.load(taken + row, mask=same, other=0.0)
            inside = same[:, None] & (cols < columns)[None, :]
            tile = tl.load(x + row[:, None] * x_row + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(tile * factor[:, None], axis=0)
            start += BLOCK_M
            last = tl.load(classes + start, mask=start < rows, other=-1)
        out = dweight + mine * dweight_row + cols.to(tl.int64) * (1 if UNIT else dweight_column)
        so_far = tl.load(out, mask=cols < columns, other=0.0).to(tl.float32)
        tl.store(out, (so_far + scale * total).to(dweight.dtype.element_ty), mask=cols < columns)


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
        function=fused_linear_cross_entropy_add_targets_kernel,
        args={
            "dweight": "*X", "x": "*X", "taken": "*fp32", "classes": "*i64", "order": "*i64",
            "rows": "i32", "n": "i32", "columns": "i32", "dweight_row": "i64", "dweight_column": "i64", "x_row": "i64",
            "ignore_index": "i64", "scale": "fp32",
        },
        aligned=["dweight", "x", "columns", "dweight_row", "x_row"],
        axes=HALVES,
        configs=[add_config(aligned=True, block_n=1024), add_config(aligned=False, block_n=256)],
    ),
]  # fmt: skip
