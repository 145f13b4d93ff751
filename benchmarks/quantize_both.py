"""quantize_both(x: (rows, n)): e4m3 as rows and as transposed columns, with one scale each"""

import torch

from benchmarks import quantize_rows
from benchmarks.op import Op


def traffic(size, rows, n):
    return rows * n * (2 * size + 2) + 4 * (rows + n), 0


def formula(x):
    return *quantize_rows.formula(x), *quantize_rows.formula(x.t().contiguous())


def ours():
    import liger_ops  # noqa: F401

    op = torch.ops.liger.quantize_both.default

    def call(x):
        q, scale, q_t, scale_t = op(x)
        return q.view(torch.uint8), scale, q_t.view(torch.uint8), scale_t

    return call


def torchao():
    call = quantize_rows.torchao()
    return lambda x: (*call(x), *call(x.t()))


OP = Op(
    dims=("rows", "n"),
    inputs=quantize_rows.inputs,
    formula=formula,
    traffic=traffic,
    providers={"ours": ours, "torchao": torchao, "copy": quantize_rows.copy},
    unchecked=quantize_rows.OP.unchecked,
    constants=frozenset({"x"}),
    passes=("forward",),
    shapes=quantize_rows.OP.shapes,
    dtypes=quantize_rows.OP.dtypes,
)
