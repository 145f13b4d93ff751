"""Attention over neighbours, over blocks of a model, and with a convolution of its probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, scaled_dot_product_attention

from ...reference._operator import widened
from .. import forms
from .activations import softmax, sparsemax

function, autograd_function = partial(forms.function, __name__), partial(forms.autograd_function, __name__)
Pair = int | tuple[int, int]


def future(scores: Tensor) -> Tensor:
    """A mask of the columns behind the diagonal. scores: (..., L, L')."""
    rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return columns > rows.unsqueeze(1)


def multi_token_attention(
    scores: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0,
    dilation: Pair = 1, groups: int = 1, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Causal probabilities of the scores, convolved, with 0 behind the diagonal. `sparse` selects sparsemax.

    scores: (B, C, L, L), weight: (C', C / groups, K, K'), bias: (C',).
    """
    if scores.dim() != 4 or scores.shape[-1] != scores.shape[-2]:
        raise ValueError(f"multi_token_attention: scores must have shape (B, C, L, L) (got {list(scores.shape)})")
    wide = widened(scores)
    causal = wide.masked_fill(future(wide), -math.inf)
    probabilities = sparsemax(causal, -1) if sparse else softmax(causal)
    of_channels = None if bias is None else widened(bias)
    mixed = conv2d(probabilities, widened(weight), of_channels, stride, padding, dilation, groups)
    return mixed.masked_fill(future(mixed), 0.0).to(scores.dtype)


def neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: int = 7, dilation: int = 1, scale: float | None = None
) -> Tensor:
    """Attention to the `kernel_size` positions around each one, `dilation` apart. Positions outside do not exist.

    query, key, value: (B, H, S, D).
    """
    positions = torch.arange(query.shape[-2], device=query.device)
    distance = (positions - positions.unsqueeze(1)).abs()
    near = (distance <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    q, k, v = (widened(t) for t in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=near, scale=scale).to(query.dtype)


def attn_res(values: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """The mean of the blocks with weights ``softmax(w_query . rms_norm(values))`` over the first dimension.

    values: (N, ..., D) or N tensors (..., D), w_query, w_norm: (D,) -> (..., D).
    """
    stacked = values if isinstance(values, Tensor) else torch.stack(list(values))
    wide = widened(stacked)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    weights = (wide @ (widened(w_query) * widened(w_norm)) * rstd).softmax(0)
    return (weights.unsqueeze(-1) * wide).sum(0).to(stacked.dtype)


LigerMultiTokenAttentionFunction = autograd_function("LigerMultiTokenAttentionFunction", multi_token_attention)
LigerFusedNeighborhoodAttentionFunction = autograd_function(
    "LigerFusedNeighborhoodAttentionFunction", neighborhood_attention
)
LigerAttnResFunction = autograd_function("LigerAttnResFunction", attn_res)
liger_multi_token_attention = function("liger_multi_token_attention", multi_token_attention)
liger_fused_neighborhood_attention = function("liger_fused_neighborhood_attention", neighborhood_attention)
liger_attn_res = function("liger_attn_res", attn_res)


class LigerMultiTokenAttention(nn.Module):
    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, stride: Pair = 1, padding: Pair = 0,
        dilation: Pair = 1, groups: int = 1, bias: bool = True, sparse: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_channels, self.out_channels, self.groups, self.sparse = in_channels, out_channels, groups, sparse
        pairs = (p if isinstance(p, tuple) else (p, p) for p in (kernel_size, stride, padding, dilation))
        self.kernel_size, self.stride, self.padding, self.dilation = pairs
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, scores: Tensor) -> Tensor:
        options = self.stride, self.padding, self.dilation, self.groups, self.sparse
        return multi_token_attention(scores, self.weight, self.bias, *options)


class LigerFusedNeighborhoodAttention(nn.Module):
    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size ({hidden_size}) must be divisible by num_heads ({num_heads})")
        if kernel_size <= 0:
            raise ValueError(f"kernel_size ({kernel_size}) must be positive")
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size ({kernel_size}) must be odd")
        if dilation < 1:
            raise ValueError(f"dilation ({dilation}) must be positive")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.kernel_size, self.dilation, self.dropout_p = kernel_size, dilation, dropout
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(4)
        )
        self.dropout = nn.Dropout(dropout) if dropout > 0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """hidden_states: (B, S, hidden_size)."""
        if attention_mask is not None:
            raise NotImplementedError("LigerFusedNeighborhoodAttention: attention_mask must be None")
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = neighborhood_attention(q, k, v, self.kernel_size, self.dilation, self.scale)
        attended = attended.transpose(1, 2).flatten(-2)
        return self.out_proj(attended if self.dropout is None else self.dropout(attended))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, kernel_size={self.kernel_size}, dilation={self.dilation}"


class LigerFusedNeighborhoodAttentionLayer(nn.Module):
    """The sum of the input and of the attention to its LayerNorm."""

    def __init__(
        self, hidden_size: int, num_heads: int, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = LigerFusedNeighborhoodAttention(
            hidden_size, num_heads, kernel_size, dilation, bias, dropout, scale
        )
        self.layer_norm = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        attended = self.attention(self.layer_norm(hidden_states), attention_mask)
        return hidden_states + (attended if self.dropout is None else self.dropout(attended))


class LigerFusedNeighborhoodAttentionConfig:
    def __init__(
        self, hidden_size: int = 768, num_heads: int = 12, kernel_size: int = 7, dilation: int = 1, bias: bool = True,
        dropout: float = 0.0, layer_norm_eps: float = 1e-5, scale: float | None = None,
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kernel_size, self.dilation = kernel_size, dilation
        self.bias, self.dropout, self.layer_norm_eps, self.scale = bias, dropout, layer_norm_eps, scale

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
