"""Which elements the dropout of adapters keeps, in torch's integers."""

import torch

MOST = 2**32 - 1


def mixed(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & MOST
    x = x ^ (x >> 15)
    # In two halves, whose products do not overflow.
    x = (x * 0x846C & MOST) * 2**16 + x * 0xA68B & MOST
    return x ^ (x >> 16)


def kept(seed: int, rate: float, rows: int, columns: int) -> torch.Tensor:
    low, high = seed & MOST, seed >> 32 & MOST
    keys = mixed(mixed(torch.arange(rows) ^ low) + high & MOST)
    x = mixed(keys[:, None] ^ (torch.arange(columns) * 0x9E3779B1 & MOST))
    signed = torch.where(x < 2**31, x, x - 2**32)
    return signed >= min(round(rate * 2**32) - 2**31, 2**31 - 1)


def dropped(x: torch.Tensor, seed: int, rate: float) -> torch.Tensor:
    mask = kept(seed, rate, x.numel() // x.shape[-1], x.shape[-1]).view(x.shape).to(x.device)
    return torch.where(mask, x / (1 - rate) if rate < 1 else 0 * x, 0)
