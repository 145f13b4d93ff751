"""quantize_blocks(x: (rows, n)): e4m3 with one scale per 128 numbers of a row"""

import torch

from benchmarks import quantize_rows
from benchmarks.op import Absent, Op

BLOCK = 128


def traffic(size, rows, n):
    return rows * n * (size + 1) + 4 * rows * (n // BLOCK), 0


def formula(x):
    q, scale = quantize_rows.formula(x.view(-1, BLOCK))
    return q.view(x.shape), scale.view(x.shape[0], -1)


def of(block):
    def ours():
        import liger_ops  # noqa: F401

        op = torch.ops.liger.quantize_blocks.default

        def call(x):
            q, scale = op(x, block=block)
            return q.view(torch.uint8), scale

        return call

    return ours


def torchao():
    try:
        from torchao.prototype.blockwise_fp8_training.kernels import triton_fp8_blockwise_act_quant_lhs
    except ImportError as error:
        raise Absent(str(error)) from None

    def call(x):
        q, scale = triton_fp8_blockwise_act_quant_lhs(x, BLOCK)
        return q.view(torch.uint8), scale

    return call


OP = Op(
    dims=("rows", "n"),
    inputs=quantize_rows.inputs,
    formula=formula,
    traffic=traffic,
    providers={"ours": of("1x128"), "ours 128x128": of("128x128"), "torchao": torchao, "copy": quantize_rows.copy},
    # Larger blocks have fewer scales; torchao rounds scale and quotient in another order.
    unchecked=frozenset({"ours 128x128", "copy", "torchao"}),
    constants=frozenset({"x"}),
    passes=("forward",),
    shapes=quantize_rows.OP.shapes,
    dtypes=quantize_rows.OP.dtypes,
)
