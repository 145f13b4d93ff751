from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import demand, operator, widened

REDUCTIONS = {"reduction": ("mean", "sum", "none")}


class CrossEntropyMetrics(NamedTuple):
    """The loss and its metrics. Only the loss has a gradient."""

    loss: Tensor
    z_loss: Tensor
    token_accuracy: Tensor
    predicted_tokens: Tensor


def _check(op: str, label_smoothing: float, lse_square_scale: float, softcap: float | None) -> None:
    demand(0 <= label_smoothing <= 1, op, "label_smoothing", "be between 0 and 1", label_smoothing)
    demand(math.isfinite(lse_square_scale), op, "lse_square_scale", "be finite", lse_square_scale)
    positive = softcap is None or 0 < softcap < math.inf
    demand(positive, op, "softcap", "be positive and finite", softcap)


def _of_tokens(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    lse_square_scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss without z-loss, z-loss, logits as they enter the softmax) of each token."""
    x = widened(logits)
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    rows, y = torch.atleast_2d(x).flatten(0, -2), target.flatten().long()
    weight = None if weight is None else weight.to(x.dtype)
    losses = functional.cross_entropy(rows, y, weight, None, ignore_index, None, "none", label_smoothing)
    z = lse_square_scale * x.logsumexp(-1).square() if lse_square_scale else torch.zeros_like(losses).view(target.shape)
    return losses.view(target.shape), z.masked_fill(target == ignore_index, 0), x


def _reduced(
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


def _predictions(x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """(1 if the prediction is right, else 0; predicted class) of each token."""
    predicted = x.argmax(-1).masked_fill(target == ignore_index, -1)
    return (predicted == target.masked_fill(target == ignore_index, -2)).to(x.dtype), predicted


def _accuracy(right: Tensor, target: Tensor, reduction: str, ignore_index: int) -> Tensor:
    if reduction == "none":
        return right
    return right.sum() / (target != ignore_index).sum() if reduction == "mean" else right.sum()


@operator(constants=("weight",), choices=REDUCTIONS)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy against class indices over the last dimension, in fp32 even for half-precision logits.

    logits: (..., V), target: (...) indices, int64 or int32, weight: (V,). With `softcap`, the logits are first replaced
    by ``softcap * tanh(logits / softcap)``. ``lse_square_scale * logsumexp^2`` (z-loss) is added to each loss.

    >>> cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, -100]))
    tensor(1.3863)
    """
    _check("cross_entropy", label_smoothing, lse_square_scale, softcap)
    losses, z, _ = _of_tokens(logits, target, weight, ignore_index, label_smoothing, lse_square_scale, softcap)
    return _reduced(losses, z, target, weight, reduction, ignore_index)[0]


@operator(constants=("weight",), choices=REDUCTIONS)
def cross_entropy_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """:func:`cross_entropy` that also computes the gradient and overwrites the logits with it.

    logits: (..., V), target: (...) indices, weight: (V,).

    >>> logits = torch.zeros(1, 2)
    >>> cross_entropy_(logits, torch.tensor([0]))
    tensor(0.6931)
    >>> logits
    tensor([[-0.5000,  0.5000]])
    """
    _check("cross_entropy_", label_smoothing, lse_square_scale, softcap)
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap)
    with torch.inference_mode(False), torch.enable_grad():
        # Autograd rejects inference tensors, but not their copies.
        x, y, w = logits.detach().clone().requires_grad_(), target.clone(), None if weight is None else weight.clone()
        (gradient,) = torch.autograd.grad(cross_entropy.reference(x, y, w, *options).sum(), x)
    loss = cross_entropy.reference(logits.clone(), target, weight, *options)
    logits.copy_(gradient)
    return loss


@operator(constants=("weight",), choices=REDUCTIONS)
def cross_entropy_with_metrics(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
) -> CrossEntropyMetrics:
    """:func:`cross_entropy` with its z-loss, the token accuracy and the predicted tokens.

    logits: (..., V), target: (...) indices, weight: (V,).

    >>> result = cross_entropy_with_metrics(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    >>> result.token_accuracy, result.predicted_tokens
    (tensor(1.), tensor([1]))
    """
    _check("cross_entropy_with_metrics", label_smoothing, lse_square_scale, softcap)
    losses, z, x = _of_tokens(logits, target, weight, ignore_index, label_smoothing, lse_square_scale, softcap)
    loss, z_loss = _reduced(losses, z, target, weight, reduction, ignore_index)
    right, predicted = _predictions(x, target, ignore_index)
    return CrossEntropyMetrics(loss, z_loss, _accuracy(right, target, reduction, ignore_index), predicted)
