"""Classes whose `apply` takes the arguments, in the order, of the package's autograd functions.

Arguments about how a kernel works, such as `in_place`, are accepted and have no meaning here.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from .. import functional as F

LossAndMetrics = tuple[Tensor, "Tensor | None", "Tensor | None", "Tensor | None"]


class LigerRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: Any = None,
    ) -> Tensor:
        return F.rms_norm(X, W, eps, offset, casting_mode)


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return F.fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


class LigerLayerNormFunction:
    @staticmethod
    def apply(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        return F.layer_norm(X, W, B, eps)


class LigerSiLUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        product = F.swiglu(a if gate_multiplier == 1.0 else a * gate_multiplier, b)
        return product if down_multiplier == 1.0 else product * down_multiplier


class LigerGELUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor) -> Tensor:
        return F.geglu(a, b)


class LigerRopeFunction:
    @staticmethod
    def apply(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Any = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        if rotary_dim is not None and cos.shape[-1] * 2 == rotary_dim:
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return F.rope(q, k, cos, sin)


class LigerQwen2VLMRopeFunction:
    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return F.rope(q, k, cos, sin, mrope_section=mrope_section)


class LigerLlama4RopeFunction:
    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: Any = None) -> tuple[Tensor, Tensor]:
        """q, k: (B, S, H, D)."""
        q, k = F.rope_freqs_cis(q.transpose(1, 2), k.transpose(1, 2), freqs_cis)
        return q.transpose(1, 2), k.transpose(1, 2)


def wanted(loss_and_metrics: Sequence[Tensor], dtype: torch.dtype, *flags: bool) -> LossAndMetrics:
    """dtype: of the z-loss. The package stores it as its input is; the accuracy is fp32."""
    loss, *metrics = loss_and_metrics
    z_loss, *others = (m if flag else None for m, flag in zip(metrics, flags))
    return loss, None if z_loss is None else z_loss.to(dtype), *others


class LigerCrossEntropyFunction:
    """The loss has the dtype of the logits, as in the package. The operator computes it in fp32."""

    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> LossAndMetrics:
        flags = return_z_loss, return_token_accuracy, return_predicted_tokens
        arguments = _input, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap
        if any(flags):
            loss, *metrics = wanted(F.cross_entropy_with_metrics(*arguments), _input.dtype, *flags)
            return loss.to(_input.dtype), *metrics
        return F.cross_entropy(*arguments).to(_input.dtype), None, None, None


class LigerFusedLinearCrossEntropyFunction:
    """The loss is fp32, as in the package."""

    @staticmethod
    def apply(
        _input: Tensor,
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
        ce_impl: Any = None,
        ce_mode: Any = None,
        chunk_mem_const: int = 1,
    ) -> LossAndMetrics:
        flags = return_z_loss, return_token_accuracy, return_predicted_tokens
        arguments = (
            _input,
            weight,
            target,
            bias,
            ce_weight,
            reduction,
            ignore_index,
            label_smoothing,
            lse_square_scale,
            softcap,
        )
        token_weight = None
        if use_token_scaling:  # each token's loss times the probability that the model gives it
            with torch.no_grad():
                found = F.fused_linear_cross_entropy_with_log_probs(
                    _input, weight, target, bias, reduction="none", ignore_index=ignore_index, softcap=softcap
                )
            token_weight = found.log_probs.exp()
        if any(flags):
            results = F.fused_linear_cross_entropy_with_metrics(*arguments, token_weight=token_weight)
            return wanted(results, _input.dtype, *flags)
        return F.fused_linear_cross_entropy(*arguments, token_weight=token_weight), None, None, None
