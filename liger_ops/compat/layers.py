"""The package's modules and functions: same constructors, same arguments, same results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from . import ops


@dataclass
class CrossEntropyOutput:
    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def output(results: Sequence[Tensor | None]) -> Tensor | CrossEntropyOutput:
    """The loss alone, unless more was asked for."""
    return results[0] if all(r is None for r in results[1:]) else CrossEntropyOutput(*results)


# ---- Norms


def filled(size: int, init_fn: str) -> nn.Parameter:
    if init_fn not in ("ones", "zeros"):
        raise AssertionError(f"init_fn must be either 'ones' or 'zeros' (got {init_fn})")
    return nn.Parameter(torch.ones(size) if init_fn == "ones" else torch.zeros(size))


class LigerRMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: Any = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        self.elementwise_affine = elementwise_affine
        self.register_parameter("weight", filled(hidden_size, init_fn) if elementwise_affine else None)
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode
        self.in_place, self.row_mode = in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.LigerRMSNormFunction.apply(
            hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        size = None if self.weight is None else tuple(self.weight.shape)
        return f"{size}, eps={self.variance_epsilon}, offset={self.offset}"


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: Any = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    pass


class LigerRMSNormForGemma3(LigerRMSNormForGemma):
    pass


class LigerFusedAddRMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.weight = filled(hidden_size, init_fn)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place = eps, offset, casting_mode, in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return ops.LigerFusedAddRMSNormFunction.apply(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: Any = None,
        mode: Any = None,
        backend: Any = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = self.variance_epsilon = eps
        self.weight = filled(hidden_size, init_fn)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.LigerLayerNormFunction.apply(hidden_states, self.weight, self.bias, self.variance_epsilon)


# ---- MLPs


def demand_silu(config: Any) -> None:
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"Activation function {config.hidden_act} not supported.")


class GatedMLP(nn.Module):
    product: Any

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.product.apply(self.gate_proj(x), self.up_proj(x)))


class LigerSwiGLUMLP(GatedMLP):
    product = ops.LigerSiLUMulFunction

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        demand_silu(config)
        super().__init__(config, intermediate_size)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    pass


class LigerGEGLUMLP(GatedMLP):
    product = ops.LigerGELUMulFunction

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        demand_silu(config)
        super().__init__()
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.LigerSiLUMulFunction.apply(*self.gate_up_proj(x).chunk(2, dim=-1)))


class LigerBlockSparseTop2MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        demand_silu(config)
        super().__init__()
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(ops.LigerSiLUMulFunction.apply(self.w1(x), self.w3(x)))


# ---- Losses


class LigerCrossEntropyLoss(nn.Module):
    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return output(
            ops.LigerCrossEntropyFunction.apply(
                _input,
                target,
                self.weight,
                self.ignore_index,
                self.lse_square_scale,
                self.label_smoothing,
                self.reduction,
                self.softcap,
                self.return_z_loss,
                self.return_token_accuracy,
                self.return_predicted_tokens,
            )
        )


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: Any = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.ce_weight = ce_weight
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.accum_dtype, self.use_token_scaling = accum_dtype, use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return output(
            ops.LigerFusedLinearCrossEntropyFunction.apply(
                _input,
                lin_weight,
                target,
                bias,
                self.ce_weight,
                self.ignore_index,
                self.lse_square_scale,
                self.label_smoothing,
                self.reduction,
                self.softcap,
                self.return_z_loss,
                self.accum_dtype,
                self.use_token_scaling,
                self.return_token_accuracy,
                self.return_predicted_tokens,
            )
        )


# ---- Functions


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Any = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    return ops.LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return ops.LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return ops.LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    return output(
        ops.LigerCrossEntropyFunction.apply(
            input,
            target,
            weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            return_token_accuracy,
            return_predicted_tokens,
        )
    )


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: Any = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    return output(
        ops.LigerFusedLinearCrossEntropyFunction.apply(
            input,
            weight,
            target,
            bias,
            ce_weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
            use_token_scaling,
            return_token_accuracy,
            return_predicted_tokens,
        )
    )


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> tuple[Tensor, Tensor]:
    return ops.LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


def liger_rms_norm(
    X: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    return ops.LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode)


functional: dict[str, Any] = {
    "CrossEntropyOutput": CrossEntropyOutput,
    "liger_cross_entropy": liger_cross_entropy,
    "liger_fused_add_rms_norm": liger_fused_add_rms_norm,
    "liger_fused_linear_cross_entropy": liger_fused_linear_cross_entropy,
    "liger_geglu": ops.LigerGELUMulFunction.apply,
    "liger_layer_norm": ops.LigerLayerNormFunction.apply,
    "liger_qwen2vl_mrope": ops.LigerQwen2VLMRopeFunction.apply,
    "liger_rms_norm": liger_rms_norm,
    "liger_rope": ops.LigerRopeFunction.apply,
    "liger_swiglu": ops.LigerSiLUMulFunction.apply,
}
