"""logits (..., V): rows sharded along any other dimension, classes over one mesh dimension. The target lies as the rows;
a replicated target is sliced. Forward gathers facts about rows where classes are sharded, and sums the divisors of a mean
where rows are."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._losses import R, Rows, refuse, spread
from .._sharding import on_dtensors


def rows_of(op: str, logits: Any, target: Any) -> Rows:
    if not isinstance(logits, DTensor):
        raise ValueError(f"{op}: logits must be a DTensor like the other arguments (got a plain tensor)")
    last, placements, split = logits.ndim - 1, [], None
    for i, p in enumerate(logits.placements):
        of_classes = p == Shard(last)
        if p.is_partial() or (of_classes and split is not None):
            refuse(
                op,
                "logits",
                "be Replicate() or Shard, with classes over one mesh dimension only,",
                logits.device_mesh,
                i,
                p,
            )
        split = i if of_classes else split
        placements.append(R if of_classes else p)
    return Rows(op, logits.device_mesh, tuple(placements), target.shape, logits.shape[-1], split)


def forward(
    op: str, logits: Any, target: Any, weight: Any, metrics: bool, reduction: str, ignore_index: int, *options: Any
) -> tuple[Any, ...]:
    rows = rows_of(op, logits, target)
    local, y, w = logits._local_tensor, rows.part("target", target), rows.whole("weight", weight)
    totals = rows.totals(y, w, reduction, ignore_index, logits.dtype)
    arguments = (metrics, reduction, ignore_index, *options, *rows.group)
    loss, z_loss, accuracy, predicted, stats, out_totals = torch.ops.liger._cross_entropy_fwd(
        local, y, w, totals, *arguments
    )
    reduced = reduction != "none"
    losses = [rows.spread(t, reduced) for t in (loss, z_loss, accuracy)]
    return *losses, rows.spread(predicted), rows.spread_statistics(stats), rows.replicated(out_totals)


@on_dtensors("_cross_entropy_fwd")
def forward_with_statistics(
    logits: Any, target: Any, weight: Any, totals: Any, metrics: bool, reduction: str, ignore_index: int,
    label_smoothing: float, lse_square_scale: float, softcap: float | None, group: str, classes: int, class_sizes: Any,
) -> tuple[Any, ...]:  # fmt: skip
    op = "cross_entropy_with_metrics" if metrics else "cross_entropy"
    options = (reduction, ignore_index, label_smoothing, lse_square_scale, softcap)
    return forward(op, logits, target, weight, metrics, *options)


@on_dtensors("cross_entropy")
def without_gradient(logits: Any, target: Any, weight: Any, **options: Any) -> Any:
    return forward("cross_entropy", logits, target, weight, False, *options.values())[0]


@on_dtensors("cross_entropy_with_metrics")
def metrics_without_gradient(logits: Any, target: Any, weight: Any, **options: Any) -> tuple[Any, ...]:
    return forward("cross_entropy_with_metrics", logits, target, weight, True, *options.values())[:4]


@on_dtensors("_cross_entropy_bwd")
def backward(
    grad: Any, logits: Any, target: Any, weight: Any, stats: Any, totals: Any, reduction: str, ignore_index: int,
    label_smoothing: float, lse_square_scale: float, softcap: float | None, group: str, classes: int, class_sizes: Any,
) -> Any:  # fmt: skip
    rows = rows_of("cross_entropy", logits, target)
    dlogits = torch.ops.liger._cross_entropy_bwd(
        rows.upstream(grad, reduction != "none"), logits._local_tensor, rows.part("target", target),
        rows.whole("weight", weight), stats._local_tensor, rows.whole("totals", totals), reduction, ignore_index,
        label_smoothing, lse_square_scale, softcap, *rows.group,
    )  # fmt: skip
    return spread(dlogits, rows.mesh, logits.placements, logits.shape)


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
