"""Backward of the embedding: row c of dweight is the sum of the rows of dout whose index is c.

The host sorts the indices, so that the rows of a class are adjacent. The program at the first of them adds all of them
up in order, in fp32, and writes the sum once. Most classes occur once, and their row is copied. Rows of classes that do
not occur are already zero.
"""

import triton
import triton.language as tl

from ..table import Config, Kernel


@triton.jit
def embedding_bwd_kernel(
    dweight, dout, indices, order, rows, columns, dout_row, padding_idx,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """indices: in ascending order; order: the row of dout for each index. dweight is contiguous."""
    blocks = tl.cdiv(columns, BLOCK_N)
    start = tl.program_id(0) // blocks
    cols = (tl.program_id(0) - start * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.load(indices + start)
    before = tl.load(indices + start - 1, mask=start > 0, other=-1)
    after = tl.load(indices + start + 1, mask=start + 1 < rows, other=-1)
    first = tl.load(order + start)
    out = dweight + mine.to(tl.int64) * columns + cols
    if (mine != before) & (mine != padding_idx):
        if mine != after:
            row = tl.load(dout + first * dout_row + cols, mask=cols < columns, other=0.0)
            tl.store(out, row, mask=cols < columns)
        else:
            total = tl.zeros([BLOCK_N], tl.float32)
            # Compensated (Kahan) summation, because a class may have thousands of rows.
            lost = tl.zeros([BLOCK_N], tl.float32)
            last = mine
            while (last == mine) & (start < rows):
                # Separate loads in the rows' own dtype: one tile of all rows would need too many registers.
                found = ()
                for i in tl.static_range(BLOCK_M):
                    at = start + i
                    same = tl.load(indices + at, mask=at < rows, other=-1) == mine
                    row = tl.load(order + at, mask=same, other=0)
                    found = found + (tl.load(dout + row * dout_row + cols, mask=same & (cols < columns), other=0.0),)
                for i in tl.static_range(BLOCK_M):
                    addend = found[i].to(tl.float32) - lost
                    larger = total + addend
                    # inf - inf would turn an infinite sum into NaN.
                    lost = tl.where(tl.abs(larger) == float("inf"), 0.0, (larger - total) - addend)
                    total = larger
                start += BLOCK_M
                last = tl.load(indices + start, mask=start < rows, other=-1)
            tl.store(out, total.to(dweight.dtype.element_ty), mask=cols < columns)


def config(aligned, block_n, block_m):
    return Config(None, aligned, 4, constexprs=dict(BLOCK_N=block_n, BLOCK_M=block_m))


KERNELS = [
    Kernel(
        function=embedding_bwd_kernel,
        args={
            "dweight": "*X", "dout": "*X", "indices": "*i32", "order": "*i64",
            "rows": "i32", "columns": "i32", "dout_row": "i64", "padding_idx": "i32",
        },
        aligned=["dweight", "dout", "columns", "dout_row"],
        axes={"dtype": [{"X": "bf16"}, {"X": "fp16"}, {"X": "fp32"}]},
        configs=[config(aligned=True, block_n=1024, block_m=8), config(aligned=False, block_n=256, block_m=8)],
    ),
]  # fmt: skip
