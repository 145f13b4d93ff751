"""The distillation losses of `liger_kernel.chunked_loss`.

Where a teacher has more classes than the student, the package gives the missing classes the logit 0 in the soft loss,
and so do these functions, by rows of zeros that are appended to a copy of the student's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import functional as F
from .. import losses
from .forms import autograd_function, layer


def padded(weight: Tensor, bias: Tensor | None, classes: int) -> tuple[Tensor, Tensor | None]:
    """The student's head with the classes of the teacher."""
    missing = classes - len(weight)
    if missing <= 0:
        return weight, bias
    return pad(weight, (0, 0, 0, missing)), None if bias is None else pad(bias, (0, missing))


def distillation(
    loss: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    true_labels: Tensor, student_bias: Tensor | None, teacher_bias: Tensor | None, *, weight_hard_loss: float,
    weight_soft_loss: float, return_soft_hard_loss: bool, ignore_index: int, soft_scale: float = 1.0, **options: Any,
) -> Any:  # fmt: skip
    """soft_scale: a factor of the soft loss, which is part of its value in the metrics."""
    head, of_classes = padded(student_weight, student_bias, len(teacher_weight))
    arguments = student_input, head, teacher_input, teacher_weight, true_labels, of_classes, teacher_bias
    options["ignore_index"] = ignore_index
    weights = weight_hard_loss, weight_soft_loss
    # One projection serves both losses.
    if head is student_weight and (all(weights) or loss is losses.cosine_distillation_loss):
        total, m = loss(*arguments, hard_weight=weights[0], soft_weight=weights[1] * soft_scale, **options)
        return (total, soft_scale * m["soft"], m["hard"]) if return_soft_hard_loss else total
    soft, _ = loss(*arguments, soft_weight=soft_scale, **options)
    hard = torch.zeros_like(soft)
    if weights[0] != 0 or return_soft_hard_loss:
        share = (1 / (true_labels != ignore_index).sum().clamp(min=1)).expand(true_labels.shape)
        hard = F.fused_linear_cross_entropy(
            student_input, student_weight, true_labels, student_bias, reduction="sum", ignore_index=ignore_index,
            token_weight=share,
        )  # fmt: skip
    total = weights[0] * hard + weights[1] * soft
    return (total, soft.detach(), hard.detach()) if return_soft_hard_loss else total


def jsd(**arguments: Any) -> Any:
    return distillation(losses.distillation_loss, **arguments)


def cosine_similarity(*, beta: float, temperature: float, **arguments: Any) -> Any:
    """The temperature does not matter: angles do not depend on the length of the vectors."""
    return distillation(losses.cosine_distillation_loss, soft_scale=beta, **arguments)


def check_temperature(loss: Any) -> None:
    if loss.temperature == 0:
        raise AssertionError("Temperature cannot be 0.")


LigerFusedLinearJSDFunction = autograd_function(__name__, "LigerFusedLinearJSDFunction", jsd)
LigerFusedLinearJSDLoss = layer(__name__, "LigerFusedLinearJSDLoss", jsd, check_temperature)
LigerFusedLinearCosineSimilarityFunction = autograd_function(
    __name__, "LigerFusedLinearCosineSimilarityFunction", cosine_similarity
)
LigerFusedLinearCosineSimilarityLoss = layer(
    __name__, "LigerFusedLinearCosineSimilarityLoss", cosine_similarity, check_temperature
)
