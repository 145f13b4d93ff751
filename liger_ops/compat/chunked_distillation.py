"""The distillation losses of `liger_kernel.chunked_loss`.

Where a teacher has more classes than the student, the package gives the missing classes the logit 0 in the soft loss, and so
do these functions, by rows of zeros that are appended to a copy of the student's weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import functional as F
from .. import losses


def padded(weight: Tensor, bias: Tensor | None, classes: int) -> tuple[Tensor, Tensor | None]:
    """The student's head with the classes of the teacher."""
    missing = classes - len(weight)
    if missing <= 0:
        return weight, bias
    return pad(weight, (0, 0, 0, missing)), None if bias is None else pad(bias, (0, missing))


def with_hard_loss(
    soft: Tensor,
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weights: tuple[float, float],
    ignore_index: int,
    both: bool,
) -> Any:
    """weights: of the hard and the soft loss; both: also returns these two."""
    hard = torch.zeros_like(soft)
    if weights[0] != 0 or both:
        share = (1 / (target != ignore_index).sum().clamp(min=1)).expand(target.shape)
        hard = F.fused_linear_cross_entropy(
            input, weight, target, bias, reduction="sum", ignore_index=ignore_index, token_weight=share
        )
    loss = weights[0] * hard + weights[1] * soft
    return (loss, soft.detach(), hard.detach()) if both else loss


class LigerFusedLinearJSDFunction:
    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None,
        teacher_bias: Tensor | None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Any:
        head, of_classes = padded(student_weight, student_bias, len(teacher_weight))
        options: dict[str, Any] = dict(beta=beta, temperature=temperature, ignore_index=ignore_index)
        arguments = student_input, head, teacher_input, teacher_weight, true_labels, of_classes, teacher_bias
        weights = weight_hard_loss, weight_soft_loss
        if head is student_weight and all(weights):
            loss, m = losses.distillation_loss(*arguments, hard_weight=weights[0], soft_weight=weights[1], **options)
            return (loss, m["soft"], m["hard"]) if return_soft_hard_loss else loss
        soft, _ = losses.distillation_loss(*arguments, **options)
        return with_hard_loss(
            soft, student_input, student_weight, true_labels, student_bias, weights, ignore_index, return_soft_hard_loss
        )


class LigerFusedLinearCosineSimilarityFunction:
    @staticmethod
    def apply(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None,
        teacher_bias: Tensor | None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Any:
        """The temperature does not matter: angles do not depend on the length of the vectors."""
        head, of_classes = padded(student_weight, student_bias, len(teacher_weight))
        if head is student_weight:  # one projection serves both losses
            loss, m = losses.cosine_distillation_loss(
                student_input, head, teacher_input, teacher_weight, true_labels, of_classes, teacher_bias,
                soft_weight=weight_soft_loss * beta, hard_weight=weight_hard_loss, ignore_index=ignore_index,
            )  # fmt: skip
            return (loss, beta * m["soft"], m["hard"]) if return_soft_hard_loss else loss
        soft, _ = losses.cosine_distillation_loss(
            student_input, head, teacher_input, teacher_weight, true_labels, of_classes, teacher_bias,
            soft_weight=beta, ignore_index=ignore_index,
        )  # fmt: skip
        weights = weight_hard_loss, weight_soft_loss
        return with_hard_loss(
            soft, student_input, student_weight, true_labels, student_bias, weights, ignore_index, return_soft_hard_loss
        )


class Distillation(nn.Module):
    function: Any

    def __init__(
        self,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> None:
        super().__init__()
        if temperature == 0:
            raise AssertionError("Temperature cannot be 0.")
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.compiled = ignore_index, temperature, compiled
        self.chunk_size, self.return_soft_hard_loss = chunk_size, return_soft_hard_loss

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Any:
        return self.function.apply(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index, self.temperature, self.compiled,
            self.chunk_size, self.return_soft_hard_loss,
        )  # fmt: skip


class LigerFusedLinearJSDLoss(Distillation):
    function = LigerFusedLinearJSDFunction


class LigerFusedLinearCosineSimilarityLoss(Distillation):
    function = LigerFusedLinearCosineSimilarityFunction
