"""The package's functions, including those of `liger_kernel.transformers.functional`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import functional as F
from . import forms, ops, signatures

function = functools.partial(forms.function, __name__)


@dataclass
class CrossEntropyOutput:
    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def output(loss: Tensor, *metrics: Tensor | None) -> Tensor | CrossEntropyOutput:
    """The loss alone if no other result was requested."""
    return loss if all(m is None for m in metrics) else CrossEntropyOutput(loss, *metrics)


def with_output(loss: Callable[..., ops.LossAndMetrics]) -> Callable[..., Tensor | CrossEntropyOutput]:
    @functools.wraps(loss)
    def wrapper(**arguments: Any) -> Tensor | CrossEntropyOutput:
        return output(*loss(**arguments))

    return wrapper


# ---- Rotary position embedding

liger_rotary_pos_emb = liger_rope = function("liger_rotary_pos_emb", ops.rope)
liger_multimodal_rotary_pos_emb = liger_qwen2vl_mrope = function("liger_multimodal_rotary_pos_emb", F.rope)
liger_llama4_text_rotary_pos_emb = function("liger_llama4_text_rotary_pos_emb", ops.llama4_rope)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin: (..., D / 2). All D columns of a head are rotated."""
    return ops.rope(q, k, cos, sin, rotary_dim=q.shape[-1])


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q, k: (S, H, D), cos, sin: (S, D)."""
    q, k = (t.transpose(0, 1).unsqueeze(0) for t in (q, k))
    q, k = ops.rope(q, k, cos, sin)
    return q.squeeze(0).transpose(0, 1), k.squeeze(0).transpose(0, 1)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """query, key: (B, S, H, D), freqs_ci: (S, D / 2) with any extra dimensions of size 1."""
    if not freqs_ci.is_complex():  # casting a model drops the imaginary part of its buffers
        freqs_ci = torch.complex(freqs_ci.float(), torch.zeros_like(freqs_ci, dtype=torch.float32))
    return ops.llama4_rope(query, key, freqs_ci.reshape(query.shape[1], -1))


def apply_liger_llama4_rope_full(modeling_module: Any) -> None:
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb


# ---- Losses, norms and gated activations

cross_entropy = with_output(ops.cross_entropy)
fused_linear_cross_entropy = with_output(ops.fused_linear_cross_entropy)

liger_cross_entropy = function("liger_cross_entropy", cross_entropy)
liger_fused_linear_cross_entropy = function("liger_fused_linear_cross_entropy", fused_linear_cross_entropy)
liger_kl_div = function("liger_kl_div", ops.kl_div)
liger_jsd = function("liger_jsd", ops.jsd)
liger_tvd = function("liger_tvd", ops.tvd)
liger_fused_linear_jsd = function("liger_fused_linear_jsd", ops.fused_linear_jsd)
liger_fused_linear_kl_div = function("liger_fused_linear_kl_div", ops.fused_linear_kl_div)
liger_fused_linear_scaled_cross_entropy_tp = function(
    "liger_fused_linear_scaled_cross_entropy_tp", ops.fused_linear_scaled_cross_entropy_tp
)
liger_fused_add_rms_norm = function("liger_fused_add_rms_norm", F.fused_add_rms_norm)
liger_rms_norm = function("liger_rms_norm", F.rms_norm)
liger_layer_norm = function("liger_layer_norm", F.layer_norm)
liger_relu_squared = function("liger_relu_squared", F.relu_squared)
liger_swiglu = function("liger_swiglu", ops.swiglu)
liger_geglu = function("liger_geglu", F.geglu)


# ---- Losses of causal language models


def unpack_cross_entropy_result(
    result: Tensor | CrossEntropyOutput | tuple,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, z-loss, token accuracy and predicted tokens, with None for absent values."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    results = result if isinstance(result, tuple) else (result,)
    return (*results, None, None, None)[:4]


def fixed_fused_linear_cross_entropy(
    hidden_states: Tensor, lm_head_weight: Tensor, target: Tensor, num_items_in_batch: int | None = None,
    ignore_index: int = -100, final_logit_softcapping: float | None = None, accum_dtype: Any = None,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, **kwargs: Any,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """The sum of the losses divided by `num_items_in_batch` if given, else the mean over the targets that count."""
    result = liger_fused_linear_cross_entropy(
        hidden_states, lm_head_weight, target, ignore_index=ignore_index, softcap=final_logit_softcapping,
        reduction="mean" if num_items_in_batch is None else "sum", return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, **kwargs,
    )  # fmt: skip
    loss, _, *metrics = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    return output(loss, None, *metrics)


def LigerForCausalLMLoss(
    hidden_states: Tensor, lm_head_weight: Tensor, labels: Tensor | None, hidden_size: int,
    num_items_in_batch: int | None = None, ignore_index: int = -100, shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False, **kwargs: Any,
) -> Tensor | CrossEntropyOutput:  # fmt: skip
    """hidden_states: (..., hidden_size). Each position predicts the label of the next position, or its entry in
    `shift_labels` if given. Unknown keywords are ignored."""
    if shift_labels is None:
        if labels is None:
            raise TypeError("LigerForCausalLMLoss: labels or shift_labels must be given (got neither)")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    known = inspect.signature(liger_fused_linear_cross_entropy).parameters
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size), lm_head_weight, shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch, ignore_index, final_logit_softcapping, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in known},
    )  # fmt: skip


def is_transformers_available() -> bool:
    return importlib.util.find_spec("transformers") is not None


# The names in `liger_kernel.transformers.functional` and `liger_kernel.transformers.model.loss_utils`.
FUNCTIONAL = ["CrossEntropyOutput", "liger_qwen2vl_mrope", "liger_rope"]
FUNCTIONAL += [name for name in signatures.FUNCTIONS if not name.endswith("pos_emb")]
LOSS_UTILS = ["LigerForCausalLMLoss", "fixed_fused_linear_cross_entropy", "unpack_cross_entropy_result"]
