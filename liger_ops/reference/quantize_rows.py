from __future__ import annotations

import torch
from torch import Tensor

from ._operator import demand, operator

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
# Keeps the inverse of a scale finite.
LEAST_SCALE = 2.0**-126


def demand_numbers(op: str, x: Tensor) -> None:
    demand(
        x.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64), op, "x",
        "be float32, float16, bfloat16 or float64", x.dtype,
    )  # fmt: skip
    demand(x.dim() > 0, op, "x", "have at least one dimension", "a scalar")


def rows_in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) -> (..., n) in e4m3, and one scale per row, (..., 1)."""
    x = x.detach().float()
    amax = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    # CUDA would multiply by the inverse of a number that is no tensor.
    scale = torch.where(amax == 0, 1.0, (amax / torch.full_like(amax, LARGEST)).clamp(min=LEAST_SCALE))
    return (x * (1 / scale)).to(E4M3), scale


def columns_in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) -> (n, T) in e4m3, and one scale per column of x, (n, 1)."""
    return rows_in_e4m3(x.reshape(x.shape[:-1].numel(), x.shape[-1]).t().contiguous())


@operator(rows=1, constants=("x",))
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits (e4m3, `torch.float8_e4m3fn`) with one fp32 scale each: ``q * scale`` is about x.

    x: (..., n) -> q (..., n) in e4m3 and scale (..., 1) in fp32.

    The scale is the row's largest magnitude divided by 448, which is the largest number of e4m3, and at least 2^-126; a
    row of zeros has the scale 1. ``q`` is ``x * (1 / scale)`` in fp32, rounded to nearest, ties to even; fp64 is
    rounded to fp32 first. A row with NaN or infinity has a scale of NaN or infinity, and ``q * scale`` is NaN. Results have no gradient: x must not require one.

    Every GPU can quantise. Those before 9.0 compute the bits of e4m3 with integers.

    Cost: moves |x| + T n bytes for T rows of n.

    >>> q, scale = quantize_rows(torch.tensor([[0.5, -1.0, 2.0]]))
    >>> q.float() * scale
    tensor([[ 0.5000, -1.0000,  2.0000]])
    """
    demand_numbers("quantize_rows", x)
    return rows_in_e4m3(x)


@operator(constants=("x",))
def quantize_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """The transpose of x in 8 bits (e4m3) with one fp32 scale per column of x, over all of its rows.

    x: (..., n), with T rows -> q_t (n, T) in e4m3, contiguous, and scale_t (n, 1) in fp32.

    The same as :func:`quantize_rows` of ``x.reshape(T, n).t()``, without a transposed copy of x. A GEMM that contracts
    over rows, such as that of a weight's gradient, takes this layout.

    Cost: moves 2 |x| + T n bytes for T rows of n: the largest magnitudes of the columns must be known first.

    >>> q_t, scale_t = quantize_columns(torch.tensor([[0.5, -1.0], [2.0, 0.0]]))
    >>> q_t.float() * scale_t
    tensor([[ 0.5000,  2.0000],
            [-1.0000,  0.0000]])
    """
    demand_numbers("quantize_columns", x)
    return columns_in_e4m3(x)


@operator(constants=("x",))
def quantize_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`quantize_rows` and :func:`quantize_columns` of x together.

    x: (..., n), with T rows -> q (..., n) in e4m3, scale (..., 1) in fp32, q_t (n, T) in e4m3, contiguous, and scale_t
    (n, 1) in fp32.

    Cost: moves 2 |x| + 2 T n bytes for T rows of n up to 16384; wider rows are read a third time.

    >>> q, scale, q_t, scale_t = quantize_both(torch.tensor([[0.5, -1.0], [2.0, 0.0]]))
    >>> bool((q_t.float() * scale_t == (q.float() * scale).t()).all())
    True
    """
    demand_numbers("quantize_both", x)
    return *rows_in_e4m3(x), *columns_in_e4m3(x)
