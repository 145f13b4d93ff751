from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._operator import demand, demand_choice, operator, widened
from .quantize_rows import columns_in_e4m3, rows_in_e4m3

RECIPES = ("rows", "rows_hp")
MULTIPLE = 16


def multiplied(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], like: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T of quantised rows, summed in fp32, or in fp64 for fp64, and rounded once."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    x, w = (q.to(dtype) * scale.to(dtype) for q, scale in (a, b))
    y = x @ w.t()
    return (y if bias is None else y + bias.to(dtype)).to(like.dtype)


class Product(torch.autograd.Function):
    """Of rows x and weight; backward quantises the upstream gradient too."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
        return multiplied(rows_in_e4m3(x), rows_in_e4m3(weight), x, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.recipe = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = multiplied(rows_in_e4m3(dy), columns_in_e4m3(weight), x)
        if ctx.needs_input_grad[1] and ctx.recipe == "rows":
            dw = multiplied(columns_in_e4m3(dy), columns_in_e4m3(x), weight)
        elif ctx.needs_input_grad[1]:
            dw = (widened(dy).t() @ widened(x)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = widened(dy).sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None


@operator(choices={"recipe": RECIPES})
def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "rows") -> Tensor:
    """``F.linear(x, weight, bias)`` whose GEMMs multiply 8-bit numbers (e4m3), quantised by :func:`quantize_rows`.

    x: (..., n), weight: (m, n), bias: (m,) -> (..., m).

    Forward quantises the rows of x and of the weight. The gradient of x multiplies the rows of the upstream gradient by
    the columns of the weight. With the recipe "rows", the gradient of the weight multiplies the columns of the upstream
    gradient by the columns of x, over all T rows; with "rows_hp", it is a GEMM of the unquantised tensors. Sums are in fp32, and
    fast accumulation (H100) is used where the sum is not over rows. Gradients that nothing needs are not computed, nor
    are their operands quantised. The weight is quantised in each call, so that no copy of it can be stale.

    n and m are multiples of 16. On CUDA, the GPU needs FP8 tensor cores: compute capability 8.9, or 9.0 and newer.
    bfloat16 is fast there; float32 and float16 take a second pass over the results. A CPU computes the same from
    dequantised numbers.

    Cost: three GEMMs in forward and backward, with "rows" all of them in 8 bits. Backward needs the weight and, if that takes a
    gradient, x: T n bytes with "rows", x itself with "rows_hp".

    >>> fp8_linear(torch.ones(1, 16), torch.eye(16))[0, :4]
    tensor([1., 1., 1., 1.])
    """
    demand_choice("fp8_linear", "recipe", RECIPES, recipe)
    demand(weight.dim() == 2, "fp8_linear", "weight", "have two dimensions", [*weight.shape])
    m, n = weight.shape
    for name, size in (("features of x", n), ("features of weight", m)):
        demand(size % MULTIPLE == 0, "fp8_linear", name, f"be a multiple of {MULTIPLE}", size)
    rows = x.reshape(x.shape[:-1].numel(), n)
    return Product.apply(rows, weight, bias, recipe).reshape(*x.shape[:-1], m)
