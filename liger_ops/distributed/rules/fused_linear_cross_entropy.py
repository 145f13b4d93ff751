"""input (..., H), weight (V, H). Over one mesh dimension the weight may be Shard(0), by classes: input is replicated, or
sharded along a sequence and then gathered chunk by chunk, as its gradient is scattered. Over the others the weight is
replicated, and tokens may be sharded: the weight's gradient is a partial sum."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from .._losses import R, Rows, part_of, placements_of, refuse, spread
from .._sharding import on_dtensors

Loss = torch.ops.liger


class Call:
    """The layout of one call."""

    def __init__(self, op: str, input: Any, weight: Any, target: Any, wanted: int) -> None:
        self.op = op
        self.mesh = mesh = next(t.device_mesh for t in (input, weight, target) if isinstance(t, DTensor))
        self.input, self.weight = input, weight
        of_input, of_weight = placements_of(input, mesh), placements_of(weight, mesh)
        split, self.sequence_dim = None, None
        rows: list[Placement] = []
        self.of_weight: list[Placement] = []  # of the weight's gradient
        for i, (x, w) in enumerate(zip(of_input, of_weight)):
            if x.is_partial() or x == Shard(input.ndim - 1):
                refuse(op, "input", "be Replicate() or sharded along tokens", mesh, i, x)
            if w not in (Shard(0), R) or (w == Shard(0) and split is not None):
                refuse(op, "weight", "be Replicate(), or Shard(0) over one mesh dimension,", mesh, i, w)
            if w == Shard(0):
                split = i
                self.sequence_dim = x.dim if isinstance(x, Shard) else None
                rows.append(R)
                self.of_weight.append(Shard(0))
            else:
                rows.append(x)
                self.of_weight.append(Partial() if isinstance(x, Shard) else R)
        plain = (not isinstance(weight, DTensor)) and any(isinstance(p, Shard) for p in rows) and wanted & 24
        if plain:
            raise ValueError(f"{op}: weight must be a DTensor where tokens are sharded (got a plain tensor)")
        self.rows = Rows(op, mesh, tuple(rows), target.shape, weight.shape[0], split)

    def local(self, t: Any) -> Any:
        return t._local_tensor if isinstance(t, DTensor) else t

    def bias(self, bias: Any) -> Any:
        placements = [p if isinstance(p, Shard) else R for p in self.of_weight]
        return part_of(self.op, "bias", bias, self.mesh, placements)

    def gradients(self, found: tuple[Any, ...], bias: Any) -> tuple[Any, ...]:
        """Of a plain tensor: plain."""
        dinput, dweight, dbias = found

        def lie(t: Any, like: Any, placements: Any) -> Any:
            if t is None or not isinstance(like, DTensor):
                return t
            return spread(t, self.mesh, placements, like.shape)

        return (
            lie(dinput, self.input, placements_of(self.input, self.mesh)),
            lie(dweight, self.weight, self.of_weight),
            self.of_bias(dbias, bias),
        )

    def of_bias(self, t: Any, bias: Any) -> Any:
        if t is None:
            return None
        found = spread(t, self.mesh, self.of_weight, (self.rows.classes,))
        return found if isinstance(bias, DTensor) else found.full_tensor()


def forward(
    op: str, wanted: int, input: Any, weight: Any, target: Any, bias: Any, ce_weight: Any, reduction: str,
    ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None, logits_scale: float,
    token_weight: Any, memory_budget: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    call = Call(op, input, weight, target, wanted)
    rows = call.rows
    y, w = rows.part("target", target), rows.whole("ce_weight", ce_weight)
    out = Loss._fused_linear_cross_entropy_fwd(
        call.local(input), call.local(weight), y, call.bias(bias), w,
        rows.totals(y, w, reduction, ignore_index, input.dtype), reduction, ignore_index, label_smoothing,
        lse_square_scale, softcap, logits_scale, rows.part("token_weight", token_weight), memory_budget, *rows.group,
        call.sequence_dim, wanted,
    )  # fmt: skip
    loss, z_loss, accuracy, predicted, log_probs, entropy, dinput, dweight, dbias, stats, totals, deferred_scale = out
    reduced = reduction != "none"
    losses = [rows.spread(t, reduced) for t in (loss, z_loss, accuracy)]
    by_token = [rows.spread(t) for t in (predicted, log_probs, entropy)]
    rest = rows.spread_statistics(stats), rows.replicated(totals), rows.replicated(deferred_scale)
    return *losses, *by_token, *call.gradients((dinput, dweight, dbias), bias), *rest


@on_dtensors("_fused_linear_cross_entropy_fwd")
def forward_with_gradients(
    input: Any, weight: Any, target: Any, bias: Any, ce_weight: Any, totals: Any, reduction: str, ignore_index: int,
    label_smoothing: float, lse_square_scale: float, softcap: float | None, logits_scale: float, token_weight: Any,
    memory_budget: int | None, group: str, classes: int, class_sizes: Any, sequence_dim: int | None, wanted: int,
) -> tuple[Any, ...]:  # fmt: skip
    form = "_with_metrics" if wanted & 1 else "_with_log_probs" if wanted & 2 else ""
    return forward(
        f"fused_linear_cross_entropy{form}", wanted, input, weight, target, bias, ce_weight, reduction, ignore_index,
        label_smoothing, lse_square_scale, softcap, logits_scale, token_weight, memory_budget,
    )  # fmt: skip


@on_dtensors("fused_linear_cross_entropy")
def without_gradient(**given: Any) -> Any:
    return forward("fused_linear_cross_entropy", 0, **given)[0]


@on_dtensors("fused_linear_cross_entropy_with_metrics")
def metrics_without_gradient(**given: Any) -> tuple[Any, ...]:
    return forward("fused_linear_cross_entropy_with_metrics", 1, **given)[:4]


@on_dtensors("fused_linear_cross_entropy_with_log_probs")
def log_probs_without_gradient(**given: Any) -> tuple[Any, ...]:
    found = forward("fused_linear_cross_entropy_with_log_probs", 2, **given)
    return found[0], *found[4:6]


@on_dtensors("_fused_linear_cross_entropy_bwd")
def backward(
    grad: Any, input: Any, weight: Any, target: Any, bias: Any, ce_weight: Any, stats: Any, totals: Any,
    reduction: str, ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None,
    logits_scale: float, token_weight: Any, memory_budget: int | None, group: str, classes: int, class_sizes: Any,
    sequence_dim: int | None, wanted: int,
) -> tuple[Any, ...]:  # fmt: skip
    call = Call("fused_linear_cross_entropy", input, weight, target, wanted)
    rows = call.rows
    found = Loss._fused_linear_cross_entropy_bwd(
        rows.upstream(grad, reduction != "none"), call.local(input), call.local(weight), rows.part("target", target),
        call.bias(bias), rows.whole("ce_weight", ce_weight), call.local(stats), rows.whole("totals", totals), reduction,
        ignore_index, label_smoothing, lse_square_scale, softcap, logits_scale,
        rows.part("token_weight", token_weight), memory_budget, *rows.group, call.sequence_dim, wanted,
    )  # fmt: skip
    return call.gradients(found, bias)
