from __future__ import annotations

import torch
from torch import Tensor

from ._operator import demand_choice, operator
from .quantize_rows import demand_numbers, rows_in_e4m3

BLOCK = 128
BLOCKS = ("1x128", "128x128")


def padded(x: Tensor, *multiples: int) -> Tensor:
    """With zeros in its last dimensions, up to multiples."""
    missing = [-size % m for size, m in zip(x.shape[-len(multiples) :], multiples)]
    return torch.nn.functional.pad(x, [n for m in reversed(missing) for n in (0, m)])


def blocks_in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., n) -> (..., n) in e4m3, and one scale per 128 numbers of a row, (..., blocks)."""
    wide = padded(x.detach(), BLOCK)
    q, scale = rows_in_e4m3(wide.reshape(*x.shape[:-1], wide.shape[-1] // BLOCK, BLOCK))
    return q.reshape(wide.shape)[..., : x.shape[-1]].contiguous(), scale.squeeze(-1)


def squares_in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """(T, n) -> (T, n) in e4m3, and one scale per 128 x 128, (blocks of T, blocks of n)."""
    wide = padded(x.detach(), BLOCK, BLOCK)
    down, across = (size // BLOCK for size in wide.shape)
    squares = wide.reshape(down, BLOCK, across, BLOCK).transpose(1, 2).reshape(down, across, BLOCK * BLOCK)
    q, scale = rows_in_e4m3(squares)
    q = q.view(down, across, BLOCK, BLOCK).transpose(1, 2).reshape(wide.shape)
    return q[: x.shape[0], : x.shape[1]].contiguous(), scale.squeeze(-1)


def tensor_in_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in e4m3, and one scale, (1, 1)."""
    q, scale = rows_in_e4m3(x.reshape(1, -1))
    return q.view(x.shape), scale


def for_each(scale: Tensor, x: Tensor, *blocks: int) -> Tensor:
    """The scale of each number of x, of blocks of this size in the last dimensions."""
    for dim, size in zip(range(-len(blocks), 0), blocks):
        scale = scale.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
    return scale


@operator(constants=("x",), choices={"block": BLOCKS})
def quantize_blocks(x: Tensor, *, block: str = "1x128") -> tuple[Tensor, Tensor]:
    """Numbers in 8 bits (e4m3, `torch.float8_e4m3fn`) with one fp32 scale per block: 128 neighbours of a row, or 128 x 128.

    x: (..., n), with T rows -> q (..., n) in e4m3, and in fp32 scale (..., n / 128) for "1x128" or (T / 128, n / 128) for
    "128x128", sizes rounded up.

    The numbers of :func:`quantize_rows`, with a scale for each block instead of each row: its largest magnitude divided by
    448, and 1 for zeros. The last blocks may be smaller than the others. With "1x128", the scales of neighbouring rows
    lie side by side in memory, as `torch.nn.functional.scaled_mm` takes them. Results have no gradient: x must not require one.

    Cost: moves |x| + T n bytes for T rows of n.

    >>> q, scale = quantize_blocks(torch.tensor([[0.5] * 128 + [-2.0]]))
    >>> 448 * scale
    tensor([[0.5000, 2.0000]])
    >>> q[:, -2:].float()
    tensor([[ 448., -448.]])
    """
    demand_numbers("quantize_blocks", x)
    demand_choice("quantize_blocks", "block", BLOCKS, block)
    if block == "1x128":
        return blocks_in_e4m3(x)
    q, scale = squares_in_e4m3(x.reshape(x.shape[:-1].numel(), x.shape[-1]))
    return q.view(x.shape), scale
