"""Adds up fp32 partial sums over their rows, in a fixed order: the last step of a parameter's gradient.

partial: (outputs, rows, n) -> out0, out1: (n,) each; program_id(1) selects the output.
"""

import triton
import triton.language as tl

from ..table import Config, Kernel


@triton.jit
def column_sum_kernel(out0, out1, partial, rows, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    which = tl.program_id(1)
    start = partial + which.to(tl.int64) * rows * n
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(0, rows, BLOCK_M):
        row = block + tl.arange(0, BLOCK_M)
        mask = (row < rows)[:, None] & (cols < n)[None, :]
        sums += tl.load(start + row.to(tl.int64)[:, None] * n + cols[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, axis=0)
    tl.store(out0 + cols, total, mask=(cols < n) & (which == 0))
    tl.store(out1 + cols, total, mask=(cols < n) & (which == 1))


KERNELS = [
    Kernel(
        function=column_sum_kernel,
        args={"out0": "*W", "out1": "*W", "partial": "*fp32", "rows": "i32", "n": "i32"},
        aligned=["out0", "out1", "partial", "n"],
        axes={"dtype": [{"W": "bf16"}, {"W": "fp16"}, {"W": "fp32"}]},
        configs=[
            Config(8192, True, 8, constexprs=dict(BLOCK_M=64, BLOCK_N=16)),
            Config(None, True, 8, constexprs=dict(BLOCK_M=64, BLOCK_N=32)),
            Config(None, False, 4, constexprs=dict(BLOCK_M=64, BLOCK_N=32)),
        ],
    ),
]
