"""The layouts of fused_linear_cross_entropy. Several ids of a token make a last dimension that is not sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from .._losses import R, Rows, part_of, placements_of, spread
from .._sharding import on_dtensors
from .fused_linear_cross_entropy import Call

Loss = torch.ops.liger
OP = "fused_linear_log_probs"
HEAD = 2 | 4  # of `wanted`: gradients of weight and bias
RESULTS = ("entropy", "mean_logits", "log_sum_sq_probs", "is_top1")


def call_of(wanted: int, input: Any, weight: Any, target: Any) -> Call:
    # fused_linear_cross_entropy's bits of `wanted`.
    return Call(OP, input, weight, target, (wanted & HEAD) << 2)


def forward(wanted: int, input: Any, weight: Any, target: Any, bias: Any, **options: Any) -> tuple[Any, ...]:
    call = call_of(wanted, input, weight, target)
    rows, mesh = call.rows, call.mesh
    group, classes, class_sizes = rows.group
    log_probs, *facts, stats, chosen, of_log_probs, of_entropy = Loss._fused_linear_log_probs_fwd(
        call.local(input), call.local(weight), rows.part("target", target), call.bias(bias), **options, group=group,
        classes=classes, class_sizes=class_sizes, sequence_dim=call.sequence_dim, wanted=wanted,
    )  # fmt: skip

    def by_row(t: Any, shape: Any) -> Any:
        return None if t is None else spread(t, mesh, rows.placements, shape)

    tokens = target.shape[: input.ndim - 1]
    shapes = (tokens, tokens, tokens, target.shape)
    found = [
        by_row(t, shape) if options[name] else rows.replicated(t) for name, t, shape in zip(RESULTS, facts, shapes)
    ]
    # Sums over this device's classes.
    sums = [Partial() if i == rows.split else p for i, p in enumerate(rows.placements)]
    products = [None if t is None else spread(t, mesh, sums, input.shape) for t in (of_log_probs, of_entropy)]
    return by_row(log_probs, target.shape), *found, by_row(stats, (*tokens, 3)), by_row(chosen, target.shape), *products


@on_dtensors("_fused_linear_log_probs_fwd")
def forward_with_graph(
    group: str, classes: int, class_sizes: Any, sequence_dim: int | None, **given: Any
) -> tuple[Any, ...]:
    return forward(**given)


@on_dtensors(OP)
def without_gradient(**given: Any) -> tuple[Any, ...]:
    return forward(0, **given)[:5]


@on_dtensors("_fused_linear_log_probs_bwd")
def backward(
    grad: Any, grad_entropy: Any, input: Any, weight: Any, target: Any, bias: Any, stats: Any, chosen: Any, group: str,
    classes: int, class_sizes: Any, sequence_dim: int | None, wanted: int, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    call = call_of(wanted, input, weight, target)
    rows = call.rows
    group, classes, class_sizes = rows.group
    upstream = [None if g is None else rows.upstream(g, False) for g in (grad, grad_entropy)]
    found = Loss._fused_linear_log_probs_bwd(
        *upstream, call.local(input), call.local(weight), rows.part("target", target), call.bias(bias),
        call.local(stats), call.local(chosen), **options, group=group, classes=classes, class_sizes=class_sizes,
        sequence_dim=call.sequence_dim, wanted=wanted,
    )  # fmt: skip
    return call.gradients(found, bias)


@on_dtensors("_fused_linear_log_probs_scale")
def scale(
    grad: Any, grad_entropy: Any, of_log_probs: Any, of_entropy: Any, target: Any, weight: Any, stats: Any, chosen: Any,
    group: str, classes: int, class_sizes: Any, **options: Any,
) -> Any:  # fmt: skip
    mesh, sums = of_log_probs.device_mesh, of_log_probs.placements
    split = next((i for i, p in enumerate(sums) if p.is_partial()), None)
    placements = tuple(p if isinstance(p, Shard) else R for p in sums)
    # Without weight, the number of classes is not read.
    rows = Rows(OP, mesh, placements, target.shape, 1 if weight is None else weight.shape[0], split)
    group, classes, class_sizes = rows.group
    upstream = [None if g is None else rows.upstream(g, False) for g in (grad, grad_entropy)]
    of_weight = [Shard(0) if i == split else R for i in range(mesh.ndim)]
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in (of_log_probs, of_entropy, stats, chosen)]
    found = Loss._fused_linear_log_probs_scale(
        *upstream, *local[:2], rows.part("target", target), part_of(OP, "weight", weight, mesh, of_weight), *local[2:],
        **options, group=group, classes=classes, class_sizes=class_sizes,
    )  # fmt: skip
    return spread(found, mesh, placements_of(of_log_probs, mesh) if split is None else placements, of_log_probs.shape)
