"""Which elements the dropout of adapters keeps, in torch's integers."""

import torch

MOST = 2**32 - 1


def times(x, number):
    """In two halves, whose products do not overflow."""
    return (x * (number >> 16) & MOST) * 2**16 + x * (number & 0xFFFF) & MOST


def mixed(x):
    x = times(x ^ (x >> 16), 0x7FEB352D)
    x = times(x ^ (x >> 15), 0x846CA68B)
    return x ^ (x >> 16)


def kept(seed: int, rate: float, rows: int, columns: int) -> torch.Tensor:
    first = mixed(torch.tensor(seed & MOST))
    second = mixed(first + (seed >> 32 & MOST) & MOST)
    keys, column = mixed(torch.arange(rows) ^ first) + second & MOST, torch.arange(columns)
    x = times(keys[:, None] ^ times(column // 2, 0x9E3779B1), 0x7FEB352D)
    x = times(x ^ (x >> 15), 0x846CA68B)
    x = torch.where(column % 2 == 1, times(x, 0x9E3779B1), x)
    signed = torch.where(x < 2**31, x, x - 2**32)
    return signed >= min(round(rate * 2**32) - 2**31, 2**31 - 1)


def dropped(x: torch.Tensor, seed: int, rate: float) -> torch.Tensor:
    mask = kept(seed, rate, x.numel() // x.shape[-1], x.shape[-1]).view(x.shape).to(x.device)
    return torch.where(mask, x / (1 - rate) if rate < 1 else 0 * x, 0)
