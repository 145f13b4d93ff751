"""fp32 numbers as sums of bf16 pieces, so that tensor cores multiply low-rank adapters in fp32 with bf16 activations.

    x = high + middle + low, each the bf16 number nearest to what is left

Three pieces hold all digits of an fp32 number, two hold 16 bits. The numbers come as `parts` summands, which a GEMM with
three pieces leaves. They are stored in four places, so that each product below reads neighbouring ones. h, m, l: high,
middle, low.

    ROWS         h h m l     adapted rows (t = x A^T, u = dy B): 0 to 2 times 1 to 3 of a weight is their product to 16 bits,
    WEIGHT       l h m h     1 to 3 and, of a weight, 0 to 2 are all digits, for a product with bf16 numbers
"""

import triton
import triton.language as tl

from ..table import Config, Kernel

BLOCK = tl.constexpr(1024)
HAS_TOTAL = tl.constexpr(1)


@triton.jit
def lora_pieces_kernel(
    pieces, total, numbers, count, columns, parts, row_stride, column_stride, part_stride, total_row, out_row, out_piece, scale,
    flags,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """total: the numbers themselves, with HAS_TOTAL."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = (index // columns).to(tl.int64)
    column = index % columns
    at = numbers + row * row_stride + column * column_stride
    x = tl.load(at, mask=inside, other=0.0)
    for part in range(1, parts):
        x += tl.load(at + part * part_stride, mask=inside, other=0.0)
    tl.store(total + row * total_row + column, x, mask=inside & ((flags & HAS_TOTAL) != 0))
    x *= scale
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    out = pieces + row * out_row + column
    if WEIGHT:
        tl.store(out, low, mask=inside)
        tl.store(out + out_piece, high, mask=inside)
        tl.store(out + 2 * out_piece, middle, mask=inside)
        tl.store(out + 3 * out_piece, high, mask=inside)
    else:
        tl.store(out, high, mask=inside)
        tl.store(out + out_piece, high, mask=inside)
        tl.store(out + 2 * out_piece, middle, mask=inside)
        tl.store(out + 3 * out_piece, low, mask=inside)


KERNELS = [
    Kernel(
        function=lora_pieces_kernel,
        args={
            "pieces": "*bf16", "total": "*fp32", "numbers": "*fp32", "count": "i32", "columns": "i32", "parts": "i32",
            "row_stride": "i64", "column_stride": "i64", "part_stride": "i64", "total_row": "i64", "out_row": "i64", "out_piece": "i64",
            "scale": "fp32", "flags": "i32",
        },
        aligned=[],
        axes={"use": [{"WEIGHT": 0}, {"WEIGHT": 1}]},
        configs=[Config(None, False, 4)],
    )
]  # fmt: skip
