"""TRL 1.16 with the operators: its chunked log-probabilities and divergences.

    import liger_ops.integrations.trl
    print(liger_ops.integrations.trl.patch())

Existing and later SFT, DPO, KTO, GRPO, RLOO and distillation trainers then compute their losses with them; `unpatch()`
undoes it. Under DeepSpeed ZeRO-3 the head's parameters are partitioned between forward and backward: these calls go to
TRL's own functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import functional as F
from ..linear.layers import autocast_dtype
from ._replacing import Replacements, Report

__all__ = ["ChunkedDivergenceFunction", "ChunkedLogProbFunction", "chunked_divergence_loss", "patch", "unpatch"]

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
LOG_PROBS = "trl.kernels.chunked_logprob.ChunkedLogProbFunction"
DIVERGENCE = "trl.kernels.chunked_divergence.ChunkedDivergenceFunction"
DIVERGENCE_LOSS = "trl.trainer.distillation_trainer._chunked_divergence_loss"


def projection(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments in the dtype in which TRL computes. A half-precision head may stay beside fp32 hidden states."""
    dtype = autocast_dtype(hidden) or hidden.dtype
    weight = weight if weight.dtype.itemsize < dtype.itemsize else weight.to(dtype)
    return hidden.to(dtype), weight, None if bias is None else bias.to(weight.dtype)


def partitioned(*parameters: Tensor | None) -> bool:
    """Whether DeepSpeed ZeRO-3 holds only a part of one of them outside of its modules."""
    return any(hasattr(p, "ds_id") for p in parameters if p is not None)


class ChunkedLogProbFunction:
    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """hidden: (N, n), weight: (V, n), bias: (V,), targets: (N,) -> log-probabilities, entropy, log_sum_sq_probs,
        mean_logits and is_top1, (N,) each, None where not in `outputs`. `chunk_size` is ignored."""
        arguments = bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
        if partitioned(weight, bias):
            return REPLACEMENTS.original(LOG_PROBS).apply(hidden, weight, *arguments)
        hidden, weight, bias = projection(hidden, weight, bias)
        wanted: dict[str, Any] = {name: name in outputs for name in OUTPUTS}
        found = F.fused_linear_log_probs(
            hidden, weight, targets, bias, logits_scale=logit_scale, softcap=final_logit_softcapping,
            temperature=temperature, **wanted,
        )  # fmt: skip
        return found.log_probs, *(getattr(found, name) if name in outputs else None for name in OUTPUTS)


class ChunkedDivergenceFunction:
    @staticmethod
    def apply(
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The divergence and the student's entropy of each token, (N,) each."""
        models = student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias
        scales = student_logit_scale, student_final_logit_softcapping, teacher_logit_scale
        if partitioned(student_weight, student_bias, teacher_weight, teacher_bias):
            own = REPLACEMENTS.original(DIVERGENCE)
            return own.apply(*models, beta, temperature, *scales, teacher_final_logit_softcapping)
        return divergence(*models, beta, temperature, *scales, teacher_final_logit_softcapping)


def divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float,
    student_scale: float,
    student_softcap: float | None,
    teacher_scale: float,
    teacher_softcap: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    s, s_weight, s_bias = projection(student_hidden, student_weight, student_bias)
    t, t_weight, t_bias = projection(teacher_hidden.detach(), teacher_weight.detach(), teacher_bias)
    t_bias = None if t_bias is None else t_bias.detach()
    found = F.fused_linear_divergence(
        s, s_weight, t, t_weight, s_bias, t_bias, beta=beta, temperature=temperature, s_logits_scale=student_scale,
        s_softcap=student_softcap, t_logits_scale=teacher_scale, t_softcap=teacher_softcap, **options,
    )  # fmt: skip
    return found.divergence, found.student_entropy


def whole(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, the sum of the student's entropies and the number of tokens. The tokens' weights are known in forward,
    so four GEMMs suffice; `ChunkedDivergenceFunction` needs six."""
    heads = student_lm_head_weight, student_lm_head_bias, teacher_lm_head_weight, teacher_lm_head_bias
    if partitioned(*heads):
        return REPLACEMENTS.original(DIVERGENCE_LOSS)(
            student_hidden_states, teacher_hidden_states, student_lm_head_weight, teacher_lm_head_weight,
            completion_mask, beta, num_items_in_batch, student_lm_head_bias, teacher_lm_head_bias, student_logit_scale,
            teacher_logit_scale, student_final_logit_softcapping, teacher_final_logit_softcapping, temperature,
        )  # fmt: skip
    s_weight, s_bias, t_weight, t_bias = map(whole, heads)
    counted = completion_mask != 0
    tokens = counted.sum()
    items = tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    share = torch.as_tensor(items, device=counted.device).float().reciprocal().expand(counted.shape)
    loss, entropy = divergence(
        student_hidden_states, s_weight, s_bias, teacher_hidden_states, t_weight, t_bias, beta, temperature,
        student_logit_scale, student_final_logit_softcapping, teacher_logit_scale, teacher_final_logit_softcapping,
        mask=counted, reduction="sum", token_weight=share,
    )  # fmt: skip
    return loss, entropy.sum(), tokens


REPLACEMENTS = Replacements(
    "trl",
    {
        LOG_PROBS: ChunkedLogProbFunction,
        "trl.trainer.utils._ChunkedLogProbFunction": ChunkedLogProbFunction,
        DIVERGENCE: ChunkedDivergenceFunction,
        DIVERGENCE_LOSS: chunked_divergence_loss,
    },
    {
        "trl.trainer.utils.selective_log_softmax": "takes logits that exist already",
        "trl.trainer.utils.selective_log_softmax_and_entropy": "takes logits that exist already",
        "trl.experimental.async_distillation": "computes its logits in its own chunks",
    },
)


def patch() -> Report:
    """Puts the functions above in place of TRL's, in all modules that hold them."""
    return REPLACEMENTS.patch()


def unpatch() -> None:
    REPLACEMENTS.unpatch()
