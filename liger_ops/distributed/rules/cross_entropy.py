"""`logits`: R or S of any dimension, of the last over one mesh dimension only; `target`: as the rows, or R -> losses of
rows: as the rows, mean and sum: P where rows are sharded, else R; gradient: as `logits`; communication: with S of the
last dimension, facts of rows are gathered, 12 bytes each per device; for a mean of sharded rows, its divisor is
reduced."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._losses import Call, R, divisors, loss_on_dtensors, of_loss, of_rows, of_statistics, refuse, replicated, spread
from .._sharding import on_dtensors


class LogitsCall(Call):
    WHOLE = (*Call.WHOLE, "weight")

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        super().__init__(op, given)
        logits = given["logits"]
        if not isinstance(logits, DTensor):
            raise ValueError(f"{op}: logits must be a DTensor like the other arguments (got a plain tensor)")
        split, by_class = None, Shard(logits.ndim - 1)
        for i, p in enumerate(logits.placements):
            if p.is_partial() or (p == by_class and split is not None):
                rule = "be Replicate() or Shard, with classes over one mesh dimension only,"
                refuse(op, "logits", rule, self.mesh, i, p)
            split = i if p == by_class else split
        rows = [R if p == by_class else p for p in logits.placements]
        self.lay_out(rows, given["target"].shape, logits.shape[-1], split)


def of_logits(call: LogitsCall, t: Tensor) -> Tensor:
    logits = call.given["logits"]
    return spread(t, call.mesh, logits.placements, logits.shape)


loss_on_dtensors(
    "cross_entropy",
    LogitsCall,
    results=(of_loss, of_loss, of_loss, of_rows, of_statistics, replicated),
    gradients=(of_logits,),
    forms={"_with_metrics": (dict(metrics=True), range(4)), "": (dict(metrics=False), (0,))},
    total=("totals", partial(divisors, logits="logits", weight="weight")),
)


def scaled(scale: Any, gradient: Any, grad: Any, op: str) -> Any:
    """A gradient that forward computed, times a number that all devices know."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    factor = grad.full_tensor() if isinstance(grad, DTensor) else grad
    result = scale(local, factor, op)
    if result is None or not isinstance(gradient, DTensor):
        return result
    return spread(result, gradient.device_mesh, gradient.placements, gradient.shape)


@on_dtensors("_cross_entropy_scale")
def scale(dlogits: Any, grad: Any, op: str) -> Tensor:
    return scaled(torch.ops.liger._cross_entropy_scale, dlogits, grad, op)


@on_dtensors("_cross_entropy_scale_")
def scale_in_place(dlogits: Any, grad: Any, op: str) -> None:
    scaled(torch.ops.liger._cross_entropy_scale_, dlogits, grad, op)
