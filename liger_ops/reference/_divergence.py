"""What kl_div, jsd and tvd share: labels and reductions."""

from __future__ import annotations

import torch
from torch import Tensor

from ._operator import demand

REDUCTIONS = {"reduction": ("mean", "batchmean", "sum", "none")}


def both(op: str, input: Tensor, target: Tensor, shift_labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Input and target in the dtype of the losses."""
    shape = list(input.shape)
    demand(input.dim() >= 1, op, "input", "have at least one dimension", "a scalar")
    demand(target.shape == input.shape, op, "target", f"have the shape of input, {shape}", list(target.shape))
    if shift_labels is not None:
        rule = f"have shape {shape[:-1]}, that of input without its last dimension"
        demand(shift_labels.shape == input.shape[:-1], op, "shift_labels", rule, list(shift_labels.shape))
    dtype = torch.promote_types(torch.promote_types(input.dtype, target.dtype), torch.float32)
    return input.to(dtype), target.to(dtype)


def reduced(
    losses: Tensor, shift_labels: Tensor | None, ignore_index: int, reduction: str, batch: int | None = None
) -> Tensor:
    """batch: what a batchmean without labels divides by, if not the number of rows."""
    if shift_labels is not None:
        counted = shift_labels != ignore_index
        losses = torch.where(counted.unsqueeze(-1), losses, 0)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    if shift_labels is None:
        rows: Tensor | int = losses.shape[:-1].numel()
        rows = rows if batch is None or reduction == "mean" else batch
    else:
        rows = counted.sum()
    # As tensors, whose 0 / 0 is NaN.
    return total / (rows * losses.shape[-1] if reduction == "mean" else rows)
