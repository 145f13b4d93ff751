"""sigmoid_gate: out = x * sigmoid(gate) + residual. With PER_ROW the gate is one number per row, in the order of the rows, and
is passed as `numbers`.

A program processes BLOCK_M rows, BLOCK_N columns at a time. dx may overwrite dout: each thread reads an element before it
writes the element.
"""

import triton
import triton.language as tl

from ..elements import DTYPES
from ..rows import block_rows, load_per_row, row_offset, store_per_row, strides
from ..table import Config, Kernel

HAS_RESIDUAL = tl.constexpr(1)
NEEDS_DX = tl.constexpr(2)
NEEDS_DGATE = tl.constexpr(4)


@triton.jit
def sigmoid_gate_fwd_kernel(
    out, x, gate, numbers, residual,
    rows, n, inner_rows, out_outer, out_inner, x_outer, x_inner, gate_outer, gate_inner, residual_outer, residual_inner, flags,
    PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = block_rows(tl.program_id(0), BLOCK_M)
    out += row_offset(row, inner_rows, out_outer, out_inner)
    x += row_offset(row, inner_rows, x_outer, x_inner)
    residual += row_offset(row, inner_rows, residual_outer, residual_inner)
    if PER_ROW:
        share = tl.sigmoid(load_per_row(numbers, row, row < rows, BLOCK_M).to(tl.float32))
    else:
        gate += row_offset(row, inner_rows, gate_outer, gate_inner)
    for start in range(0, n, BLOCK_N):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = (row < rows) & (cols < n)
        v = tl.load(x + cols, mask=mask, other=0.0).to(tl.float32)
        if not PER_ROW:
            share = tl.sigmoid(tl.load(gate + cols, mask=mask, other=0.0).to(tl.float32))
        added = tl.load(residual + cols, mask=mask & ((flags & HAS_RESIDUAL) != 0), other=0.0).to(tl.float32)
        tl.store(out + cols, (added + v * share).to(out.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_gate_bwd_kernel(
    dx, dgate, dnumbers, dout, x, gate, numbers,
    rows, n, inner_rows, dx_outer, dx_inner, dgate_outer, dgate_inner, dout_outer, dout_inner, x_outer, x_inner,
    gate_outer, gate_inner, flags,
    PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = block_rows(tl.program_id(0), BLOCK_M)
    dx += row_offset(row, inner_rows, dx_outer, dx_inner)
    dout += row_offset(row, inner_rows, dout_outer, dout_inner)
    x += row_offset(row, inner_rows, x_outer, x_inner)
    if PER_ROW:
        share = tl.sigmoid(load_per_row(numbers, row, row < rows, BLOCK_M).to(tl.float32))
    else:
        gate += row_offset(row, inner_rows, gate_outer, gate_inner)
        at_gradient = dgate + row_offset(row, inner_rows, dgate_outer, dgate_inner)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n, BLOCK_N):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = (row < rows) & (cols < n)
        v = tl.load(x + cols, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dout + cols, mask=mask, other=0.0).to(tl.float32)
        if PER_ROW:
            sums += d * v
        else:
            share = tl.sigmoid(tl.load(gate + cols, mask=mask, other=0.0).to(tl.float32))
            slope = d * v * share * (1 - share)
            wanted = mask & ((flags & NEEDS_DGATE) != 0)
            tl.store(at_gradient + cols, slope.to(dgate.dtype.element_ty), mask=wanted)
        tl.store(dx + cols, (d * share).to(dx.dtype.element_ty), mask=mask & ((flags & NEEDS_DX) != 0))
    if PER_ROW:
        total = tl.sum(sums, 1)[:, None] * share * (1 - share)
        wanted = (row < rows) & ((flags & NEEDS_DGATE) != 0)
        store_per_row(dnumbers, row, total.to(dnumbers.dtype.element_ty), wanted, BLOCK_M)


SIZES = {"rows": "i32", "n": "i32", "inner_rows": "i32"}
FORWARD_STRIDES = strides("out", "x", "gate", "residual")
BACKWARD_STRIDES = strides("dx", "dgate", "dout", "x", "gate")
AXES = {"dtype": [{**choice, "A": choice["X"]} for choice in DTYPES], "per_row": [{"PER_ROW": 0}, {"PER_ROW": 1}]}
CONFIGS = [
    Config(256, True, 4, constexprs=dict(BLOCK_M=4, BLOCK_N=256)),
    Config(None, True, 4, constexprs=dict(BLOCK_M=1, BLOCK_N=1024)),
    Config(None, False, 4, constexprs=dict(BLOCK_M=1, BLOCK_N=1024)),
]

KERNELS = [
    Kernel(
        function=sigmoid_gate_fwd_kernel,
        args={
            "out": "*X", "x": "*X", "gate": "*X", "numbers": "*A", "residual": "*X", **SIZES, **FORWARD_STRIDES, "flags": "i32",
        },
        aligned=["out", "x", "gate", "residual", "n", *FORWARD_STRIDES],
        axes=AXES,
        configs=CONFIGS,
    ),
    Kernel(
        function=sigmoid_gate_bwd_kernel,
        args={
            "dx": "*X", "dgate": "*X", "dnumbers": "*A", "dout": "*X", "x": "*X", "gate": "*X", "numbers": "*A",
            **SIZES, **BACKWARD_STRIDES, "flags": "i32",
        },
        aligned=["dx", "dgate", "dout", "x", "gate", "n", *BACKWARD_STRIDES],
        axes=AXES,
        configs=CONFIGS,
    ),
]  # fmt: skip
