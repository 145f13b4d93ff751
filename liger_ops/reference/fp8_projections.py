from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._operator import demand, demand_choice, operator, widened
from .quantize_blocks import BLOCK, blocks_in_e4m3, for_each, squares_in_e4m3, tensor_in_e4m3
from .quantize_rows import columns_in_e4m3, rows_in_e4m3

RECIPES = ("rows", "rows_hp", "tensor", "blocks")


def multiple_of(recipe: str) -> int:
    """Of which features are multiples."""
    return BLOCK if recipe == "blocks" else 16


Quantised = tuple[Tensor, Tensor]  # and scales that broadcast against it


def activation(x: Tensor, recipe: str) -> Quantised:
    """Of rows of x, or of dy."""
    if recipe != "blocks":
        return tensor_in_e4m3(x) if recipe == "tensor" else rows_in_e4m3(x)
    q, scale = blocks_in_e4m3(x)
    return q, for_each(scale, q, BLOCK)


def over_tokens(x: Tensor, recipe: str) -> Quantised:
    """Of columns of x, or of dy."""
    return columns_in_e4m3(x) if recipe == "rows" else activation(x.t().contiguous(), recipe)


def weight_rows(weight: Tensor, recipe: str) -> Quantised:
    if recipe != "blocks":
        return activation(weight, recipe)
    q, scale = squares_in_e4m3(weight)
    return q, for_each(scale, q, BLOCK, BLOCK)


def weight_columns(weight: Tensor, recipe: str) -> Quantised:
    if recipe in ("rows", "rows_hp"):
        return columns_in_e4m3(weight)
    return weight_rows(weight.t().contiguous(), recipe)


def multiplied(a: Quantised, b: Quantised, like: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T of quantised rows, summed in fp32, or in fp64 for fp64, and rounded once."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    x, w = (q.to(dtype) * scale.to(dtype) for q, scale in (a, b))
    y = x @ w.t()
    return (y if bias is None else y + bias.to(dtype)).to(like.dtype)


class Product(torch.autograd.Function):
    """Of rows x and weight; backward quantises the upstream gradient too."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
        return multiplied(activation(x, recipe), weight_rows(weight, recipe), x, bias)

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
            dx = multiplied(activation(dy, ctx.recipe), weight_columns(weight, ctx.recipe), x)
        if ctx.needs_input_grad[1] and ctx.recipe != "rows_hp":
            dw = multiplied(over_tokens(dy, ctx.recipe), over_tokens(x, ctx.recipe), weight)
        elif ctx.needs_input_grad[1]:
            dw = (widened(dy).t() @ widened(x)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = widened(dy).sum(0).to(ctx.bias_dtype)
        return dx, dw, db, None


def product(
    op: str, x: Tensor, names: Sequence[str], weights: Sequence[Tensor], bias: Tensor | None, recipe: str
) -> Tensor:
    """By the stacked weights. names: of them."""
    demand_choice(op, "recipe", RECIPES, recipe)
    n, multiple = x.shape[-1], multiple_of(recipe)
    rule = f"be a multiple of {multiple}" + (" with the recipe 'blocks'" if recipe == "blocks" else "")
    demand(n % multiple == 0, op, "features of x", rule, n)
    for name, weight in zip(names, weights):
        demand(weight.dim() == 2, op, name, "have two dimensions", [*weight.shape])
        m = weight.shape[0]
        demand(m % multiple == 0, op, f"features of {name}", rule, m)
    weight = weights[0] if len(weights) == 1 else torch.cat([*weights])
    rows = x.reshape(x.shape[:-1].numel(), n)
    return Product.apply(rows, weight, bias, recipe).reshape(*x.shape[:-1], weight.shape[0])


@operator(choices={"recipe": RECIPES})
def fp8_projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, recipe: str = "rows") -> Tensor:
    """:func:`fp8_linear` of several weights of one x, which is quantised once: their results side by side.

    x: (..., n), weights: (m, n) each, biases: (m,) each, or an empty list -> (..., all m).

    The same numbers as ``fp8_linear(x, torch.cat(weights), torch.cat(biases))``, without these copies: in the gradient of x
    a row of all upstream gradients has one scale, and so has a column of all weights. With the recipe "tensor" all weights
    share a scale, and so do all upstream gradients. Each n and m is a multiple of 16, with "blocks" of 128.

    Cost: as :func:`fp8_linear`; one GEMM in forward, one for the gradient of x, and one for that of each weight.

    >>> fp8_projections(torch.ones(1, 16), [torch.eye(16), 2 * torch.eye(16)], [])[0, ::8]
    tensor([1., 1., 2., 2.])
    """
    op = "fp8_projections"
    demand(len(weights) > 0, op, "weights", "have an entry", 0)
    rule = f"be empty or have as many entries as weights, {len(weights)}"
    demand(len(biases) in (0, len(weights)), op, "biases", rule, len(biases))
    names = [f"weights[{i}]" for i in range(len(weights))]
    return product(op, x, names, weights, torch.cat([*biases]) if len(biases) else None, recipe)
