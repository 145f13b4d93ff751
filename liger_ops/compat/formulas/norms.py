"""GroupNorm and the modulated RMSNorm of diffusion transformers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ... import functional as F
from ...reference._operator import widened
from .. import forms
from ..layers import LigerRMSNorm, filled_parameter

function, autograd_function = partial(forms.function, __name__), partial(forms.autograd_function, __name__)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_channels: int, num_groups: int, eps: float) -> Tensor:
    """x: (B, C, ...), weight, bias: (C,)."""
    if x.dim() < 2 or x.shape[1] != num_channels or num_channels % num_groups:
        shape = f"(batch, num_channels={num_channels}, ...) with a multiple of num_groups={num_groups} channels"
        raise AssertionError(f"group_norm: the input must have shape {shape} (got {list(x.shape)})")
    return torch.group_norm(widened(x), num_groups, widened(weight), widened(bias), eps).to(x.dtype)


def modulated_rms_norm(
    x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6,
    offset: float = 0.0, casting_mode: str = "llama",
) -> Tensor:  # fmt: skip
    """``rms_norm(x) (1 + scale) + shift``. It rounds once in every casting mode.

    x: (..., n), scale, shift: (..., n) with m rows, where m divides the number N of x's rows: each is for N / m
    consecutive rows.
    """
    n = x.shape[-1]
    groups = scale.numel() // n if n else 0
    rows = x.numel() // n if n else 0
    if groups == 0 or scale.shape[-1] != n or rows % groups:
        raise AssertionError(f"modulated_rms_norm: scale must have a number of rows of {n} that divides {rows} "
                             f"(got shape {list(scale.shape)})")  # fmt: skip
    if shift is not None and shift.numel() != scale.numel():
        raise AssertionError(f"modulated_rms_norm: shift must have as many elements as scale, {scale.numel()} "
                             f"(got {shift.numel()})")  # fmt: skip
    normed = F.rms_norm(widened(x), None if weight is None else widened(weight), eps, offset, casting_mode)
    by_group = normed.reshape(groups, -1, n) * (1 + widened(scale).reshape(groups, 1, n))
    if shift is not None:
        by_group = by_group + widened(shift).reshape(groups, 1, n)
    return by_group.view(x.shape).to(x.dtype)


LigerGroupNormFunction = autograd_function("LigerGroupNormFunction", group_norm)
LigerModulatedRMSNormFunction = autograd_function("LigerModulatedRMSNormFunction", modulated_rms_norm)
liger_group_norm = function("liger_group_norm", group_norm)
liger_modulated_rms_norm = function("liger_modulated_rms_norm", modulated_rms_norm)


class LigerGroupNorm(nn.Module):
    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if num_channels % num_groups:
            raise AssertionError(f"num_channels must be a multiple of num_groups (got {num_channels}, {num_groups})")
        self.num_channels, self.num_groups = num_channels, num_groups
        self.eps = self.variance_epsilon = eps
        self.weight = filled_parameter(num_channels, init_fn)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dim() < 3:
            raise AssertionError(f"the input must have at least 3 dimensions (got {hidden_states.dim()})")
        options = self.num_channels, self.num_groups, self.variance_epsilon
        return group_norm(hidden_states, self.weight, self.bias, *options)

    def extra_repr(self) -> str:
        return f"num_channels={self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


class LigerModulatedRMSNorm(LigerRMSNorm):
    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, None, elementwise_affine)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None
    ) -> Tensor:
        options = self.variance_epsilon, self.offset, self.casting_mode
        return modulated_rms_norm(hidden_states, self.weight, scale, shift, *options)
