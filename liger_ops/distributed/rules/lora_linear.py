"""`x`: R or S of any dimension but the last; `weight`, `a`, `b`, `bias`: R -> as `x`; gradients: as `x`, of others P
where rows are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from ...reference._wanted import WANT_INPUT
from .._losses import part_of, placements_of, refuse, spread
from .._sharding import R, on_dtensors

OP = "lora_linear"


class Parts:
    """What each device has of the arguments."""

    def __init__(self, x: Any, *others: Any) -> None:
        self.mesh = next(t.device_mesh for t in (x, *others) if isinstance(t, DTensor))
        self.x, self.rows = x, placements_of(x, self.mesh)
        for i, p in enumerate(self.rows):
            if p.is_partial() or (isinstance(p, Shard) and p.dim == x.ndim - 1):
                refuse(OP, "x", "be Replicate() or sharded along rows", self.mesh, i, p)

    def whole(self, name: str, t: Any) -> Any:
        return part_of(OP, name, t, self.mesh, (R,) * self.mesh.ndim)

    def all_whole(self, name: str, given: Sequence[Any]) -> list[Any]:
        return [self.whole(f"{name}[{i}]", t) for i, t in enumerate(given)]

    def of_rows(self, name: str, t: Any) -> Any:
        return part_of(OP, name, t, self.mesh, self.rows)

    def spread_rows(self, t: Tensor, columns: int) -> DTensor:
        return spread(t, self.mesh, self.rows, (*self.x.shape[:-1], columns))

    def summed(self, t: Tensor, like: Any) -> Tensor:
        """The gradient of `like`: plain, if that is."""
        placements: list[Placement] = [Partial() if isinstance(p, Shard) else R for p in self.rows]
        found = spread(t, self.mesh, placements, t.shape)
        return found if isinstance(like, DTensor) else found.full_tensor()


def computed(op: Any, x: Any, weight: Any, a: Any, b: Any, scale: Any, bias: Any) -> tuple[Parts, Any]:
    parts = Parts(x, weight, *a, *b, bias)
    adapters = parts.all_whole("a", a), parts.all_whole("b", b)
    return parts, op(parts.of_rows("x", x), parts.whole("weight", weight), *adapters, scale, parts.whole("bias", bias))


@on_dtensors(OP)
def forward(x: Any, weight: Any, a: Any, b: Any, scale: Any, bias: Any) -> Any:
    parts, y = computed(torch.ops.liger.lora_linear, x, weight, a, b, scale, bias)
    return parts.spread_rows(y, weight.shape[0])


@on_dtensors("_lora_linear_fwd")
def forward_with_graph(x: Any, weight: Any, a: Any, b: Any, scale: Any, bias: Any) -> Any:
    parts, (y, t) = computed(torch.ops.liger._lora_linear_fwd, x, weight, a, b, scale, bias)
    return parts.spread_rows(y, weight.shape[0]), parts.spread_rows(t, t.shape[-1])


@on_dtensors("_lora_projections_bwd")
def backward(
    grads: Any, x: Any, weights: Any, a: Any, b: Any, t: Any, wanted: int, scale: Any, of: Any, seeds: None, dropout: Any,
) -> list[Tensor]:  # fmt: skip
    # lora_linear has no dropout.
    parts = Parts(x, *grads, *weights, *a, *b, t)
    found = iter(
        torch.ops.liger._lora_projections_bwd(
            [parts.of_rows("the gradient", grad) for grad in grads], parts.of_rows("x", x),
            parts.all_whole("weights", weights), parts.all_whole("a", a), parts.all_whole("b", b),
            parts.of_rows("t", t), wanted, scale, of, seeds, dropout,
        )
    )  # fmt: skip
    out: list[Tensor] = []
    if wanted & WANT_INPUT:
        dx = parts.spread_rows(next(found), x.shape[-1])
        out.append(dx if isinstance(x, DTensor) else dx.full_tensor())
    present = [weight for weight in weights if weight is not None]
    for i, like in enumerate((present, present, a, b), start=1):
        out += [parts.summed(next(found), t) for t in like] if wanted >> i & 1 else []
    return out
