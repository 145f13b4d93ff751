"""Saves a scripted language model for train.cpp: `python examples/cpp/model.py model.pt [cuda]`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import liger_ops  # noqa: F401  registers torch.ops.liger


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.liger.rms_norm(x, self.weight)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).transpose(1, 3).unbind(2)
        q, k = torch.ops.liger.rope(q, k, cos, sin)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.ops.liger.swiglu_packed(self.gate_up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.Parameter(torch.ones(width)), Mlp(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed, x = torch.ops.liger.fused_add_rms_norm(self.attention(self.norm1(x), cos, sin), x, self.norm2)
        return x + self.mlp(normed)


class TinyLlama(nn.Module):
    """tokens: (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(
        self, vocabulary: int = 128, width: int = 64, heads: int = 4, inner: int = 96, layers: int = 2
    ) -> None:
        super().__init__()
        self.head_size = width // heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = 10000.0 ** (-torch.arange(0, self.head_size, 2, device=tokens.device) / self.head_size)
        angles = torch.outer(positions, rates).repeat(1, 2)[None]
        x = self.embedding(tokens)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class WithLoss(nn.Module):
    """(tokens, next tokens) -> the mean loss."""

    def __init__(self, model: TinyLlama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return torch.ops.liger.cross_entropy(self.model(tokens), target)


if __name__ == "__main__":
    torch.manual_seed(0)
    path, device = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu"
    torch.jit.script(WithLoss(TinyLlama()).to(device)).save(path)
