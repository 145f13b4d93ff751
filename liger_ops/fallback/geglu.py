"""geglu without C++."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .swiglu import demand, register_gated

TANH = 1


def flags(approximate: str = "tanh") -> dict[str, int]:
    demand(approximate in ("tanh", "none"), "geglu", "approximate", "be 'tanh' or 'none'", f"'{approximate}'")
    return {"flags": TANH if approximate == "tanh" else 0}


def tanh_argument(x: Tensor) -> Tensor:
    """2 z, as liger_ops/kernels/geglu.py has it."""
    return 2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)


def gelu(x: Tensor, approximate: str = "tanh") -> Tensor:
    return x * (torch.special.ndtr(x) if approximate == "none" else torch.sigmoid(tanh_argument(x)))


def gelu_slope(x: Tensor, approximate: str = "tanh") -> Tensor:
    if approximate == "none":
        return torch.special.ndtr(x) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    z = tanh_argument(x)
    s = torch.sigmoid(z)
    return s + s * torch.sigmoid(-z) * 2 * math.sqrt(2 / math.pi) * x * (1 + 3 * 0.044715 * x * x)


def register() -> None:
    register_gated("geglu", 'str approximate="tanh"', gelu, gelu_slope, flags)
