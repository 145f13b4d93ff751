"""Modules for the layers of Megatron-Core, with the parameters of those that they replace. Megatron is never imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from .layers import LigerVocabParallelCrossEntropy


class LigerMegatronRMSNorm(nn.Module):
    """`persist_layer_norm` and `normalization` are ignored. With `zero_centered_gamma`, here or in the config, the
    weight is 0 where others are 1."""

    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False, normalization: str = "RMSNorm",
    ) -> None:  # fmt: skip
        super().__init__()
        found = getattr(config, "normalization", "RMSNorm")
        if found != "RMSNorm":
            raise ValueError(f"LigerMegatronRMSNorm requires config.normalization='RMSNorm'; got {found!r}.")
        self.config, self.eps = config, eps
        self.zero_centered_gamma = zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False)
        self.hidden_size = torch.Size([hidden_size] if isinstance(hidden_size, int) else hidden_size)
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        self.reset_parameters()
        # With it, Megatron sums the gradient over the ranks.
        self.weight.sequence_parallel = getattr(config, "sequence_parallel", False)  # type: ignore[attr-defined]

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight, self.eps, 1.0 if self.zero_centered_gamma else 0.0)

    def extra_repr(self) -> str:
        return f"{tuple(self.hidden_size)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):  # type: ignore[valid-type, misc]
    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "megatron", label_smoothing_mode: str = "partition",
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)


class LigerMegatronSwiGLU(nn.Module):
    """Called as Megatron's `bias_swiglu_impl`. A call with a bias, fp8 storage or offloading goes to `fallback_impl`."""

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place

    def forward(
        self, input: Tensor, bias: Tensor | None = None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        if bias is not None or fp8_input_store or cpu_offload_input:
            if self.fallback_impl is None:
                raise RuntimeError("LigerMegatronSwiGLU cannot serve a bias, fp8_input_store or cpu_offload_input: "
                                   "give it fallback_impl, such as Megatron's bias_swiglu_impl")  # fmt: skip
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        return F.swiglu_packed(input)
