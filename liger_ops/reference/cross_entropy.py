from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import capped, demand, demand_positive, form_of, operator
from ._split import split_of, splittable, vocab_parallel

REDUCTIONS = {"reduction": ("mean", "sum", "none")}


class CrossEntropyMetrics(NamedTuple):
    """The loss and its metrics. Only the loss has a gradient. Loss, z-loss and accuracy are fp32, scalars or (...) with
    reduction "none"; the predicted tokens are (...) in int64, and -1 where the target is `ignore_index`."""

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor


def check_options(op: str, label_smoothing: float, lse_square_scale: float, softcap: float | None) -> None:
    demand(0 <= label_smoothing <= 1, op, "label_smoothing", "be between 0 and 1", label_smoothing)
    demand(math.isfinite(lse_square_scale), op, "lse_square_scale", "be finite", lse_square_scale)
    demand_positive(op, "softcap", softcap)


def losses_of(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, lse_square_scale: float
) -> tuple[Tensor, Tensor]:
    """(loss without z-loss, z-loss) of each token. x: logits as they enter the softmax."""
    rows, y = torch.atleast_2d(x).flatten(0, -2), target.flatten().long()
    weight = None if weight is None else weight.to(x.dtype)
    losses = functional.cross_entropy(rows, y, weight, None, ignore_index, None, "none", label_smoothing)
    z = lse_square_scale * x.logsumexp(-1).square() if lse_square_scale else torch.zeros_like(losses).view(target.shape)
    return losses.view(target.shape), z.masked_fill(target == ignore_index, 0)


def reduced(
    losses: Tensor, z_losses: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """(loss, z-loss). A mean divides the loss by the sum of the targets' weights, the z-loss by their number."""
    if reduction == "none":
        return losses + z_losses, z_losses.detach()
    counted = target != ignore_index
    by_count = by_weight = counted.sum()
    if weight is not None:
        of_targets = weight.to(losses.dtype)[target.masked_fill(~counted, 0).long()]
        by_weight = of_targets.masked_fill(~counted, 0).sum()
    z_loss = z_losses.sum() / by_count if reduction == "mean" else z_losses.sum()
    loss = losses.sum() / by_weight if reduction == "mean" else losses.sum()
    return loss + z_loss, z_loss.detach()


def predictions_of(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(1 if the prediction is right, else 0; predicted class) of each token."""
    predicted = x.argmax(-1).masked_fill(target == ignore_index, -1)
    return (predicted == target.masked_fill(target == ignore_index, -2)).to(x.dtype), predicted


def with_metrics(
    loss: Tensor, z_loss: Tensor, right: Tensor, predicted: Tensor, *,
    target: Tensor, reduction: str, ignore_index: int, **_: Any,
) -> CrossEntropyMetrics:  # fmt: skip
    if reduction != "none":
        right = right.sum() / (target != ignore_index).sum() if reduction == "mean" else right.sum()
    return CrossEntropyMetrics(loss, z_loss, right, predicted)


def _of_logits(
    op: str, logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int,
    label_smoothing: float, lse_square_scale: float, softcap: float | None,
    group: str = "", classes: int = 0, class_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, z-loss, logits as they enter the softmax)."""
    check_options(op, label_smoothing, lse_square_scale, softcap)
    split = split_of(op, group, classes, class_sizes)
    if split is not None:
        split.check("logits", logits.shape[-1])
        logits = split.all_classes(logits)
    x = capped(logits, softcap)
    losses, z = losses_of(x, target, weight, ignore_index, label_smoothing, lse_square_scale)
    return *reduced(losses, z, target, weight, reduction, ignore_index), x


@operator(constants=("weight",), choices=REDUCTIONS)
@splittable("`logits`")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    *,
    group: str = "",
    classes: int = 0,
    class_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Cross entropy against class indices over the last dimension, in fp32 even for half-precision logits.

    logits: (..., V), target: (...) indices, weight: (V,) in logits' dtype or fp32 -> a scalar, or (...) with reduction
    "none", in fp32.

    `weight`, `ignore_index`, `label_smoothing` and the default reduction "mean" are those of
    :func:`torch.nn.functional.cross_entropy`. With `softcap`, which is positive, the logits are first replaced by
    ``softcap * tanh(logits / softcap)``. ``lse_square_scale * logsumexp^2`` (z-loss) is added to each loss.

    Cost: forward moves |logits|, backward 2 |logits|. Backward needs the tensor arguments and three fp32 numbers per
    row. It overwrites the logits with their gradient.

    >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
    tensor(1.3863)
    """
    return _of_logits(
        "cross_entropy", logits, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
        group, classes, class_sizes,
    )[0]  # fmt: skip


@form_of(cross_entropy, without=("group", "classes", "class_sizes"))
def cross_entropy_(op: str, logits: Tensor, target: Tensor, weight: Tensor | None, **options: Any) -> Tensor:
    """:func:`cross_entropy` that also computes the gradient and overwrites the logits with it.

    logits: (..., V), target: (...) indices, weight: (V,).

    Cost: forward moves 2 |logits|. Backward scales the gradient in place, and moves nothing if the upstream gradient is
    1. It needs the gradient alone.

    >>> logits = torch.zeros(1, 2)
    >>> cross_entropy_(logits, torch.tensor([0]))
    tensor(0.6931)
    >>> logits
    tensor([[-0.5000,  0.5000]])
    """
    loss, *_ = _of_logits(op, logits.clone(), target, weight, **options)
    with torch.inference_mode(False), torch.enable_grad():
        # Autograd rejects inference tensors, but not their copies.
        x, y, w = logits.detach().clone().requires_grad_(), target.clone(), None if weight is None else weight.clone()
        (gradient,) = torch.autograd.grad(_of_logits(op, x, y, w, **options)[0].sum(), x)
    logits.copy_(gradient)
    return loss


@form_of(cross_entropy)
def cross_entropy_with_metrics(**given: Any) -> CrossEntropyMetrics:
    """:func:`cross_entropy` with its z-loss, the token accuracy and the predicted tokens.

    logits: (..., V), target: (...) indices, weight: (V,).

    >>> result = cross_entropy_with_metrics(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    >>> result.token_accuracy, result.predicted_tokens
    (tensor(1.), tensor([1]))
    """
    loss, z_loss, x = _of_logits(**given)
    return with_metrics(loss, z_loss, *predictions_of(x, given["target"], given["ignore_index"]), **given)


vocab_parallel_cross_entropy = vocab_parallel(cross_entropy)
vocab_parallel_cross_entropy_with_metrics = vocab_parallel(cross_entropy_with_metrics)
