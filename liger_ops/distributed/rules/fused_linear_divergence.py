"""Inputs (..., H), weights (V, H). Tokens may be sharded, alike for both models; weights are replicated, and the student's
gradients of weight and bias are then partial sums."""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from .._losses import R, part_of, placements_of, refuse, spread
from .._sharding import on_dtensors

OP = "fused_linear_divergence"
WEIGHT_OR_BIAS = 6  # bits of `wanted`


class Call:
    """The layout of one call, and each device's part of its tensors."""

    def __init__(self, wanted: int, s_input: Any, s_weight: Any, s_bias: Any, **given: Any) -> None:
        tensors = dict(s_input=s_input, s_weight=s_weight, s_bias=s_bias, **given)
        self.mesh = mesh = next(t.device_mesh for t in tensors.values() if isinstance(t, DTensor))
        self.given = tensors
        self.rows: tuple[Placement, ...] = placements_of(s_input, mesh)
        for i, placement in enumerate(self.rows):
            if placement.is_partial() or placement == Shard(s_input.ndim - 1):
                refuse(OP, "s_input", "be Replicate() or sharded along tokens", mesh, i, placement)
        for name in ("s_weight", "s_bias"):
            learned = wanted & WEIGHT_OR_BIAS and self.sharded and tensors[name] is not None
            if learned and not isinstance(tensors[name], DTensor):
                raise ValueError(f"{OP}: {name} must be a DTensor where tokens are sharded (got a plain tensor)")
        by_token = ("s_input", "t_input", "mask", "token_weight")
        self.parts = {
            name: part_of(OP, name, t, mesh, self.rows if name in by_token else (R,) * mesh.ndim)
            for name, t in tensors.items()
        }

    @property
    def sharded(self) -> list[int]:
        return [i for i, p in enumerate(self.rows) if isinstance(p, Shard)]

    @property
    def tokens(self) -> torch.Size:
        return self.given["s_input"].shape[:-1]

    def total(self, reduction: str) -> Any:
        """What a mean over the tokens of all devices divides by; None if each device has all tokens."""
        if reduction != "mean" or not self.sharded:
            return None
        x, mask, weight = (self.parts[name] for name in ("s_input", "mask", "token_weight"))
        dtype = torch.promote_types(x.dtype, torch.float32)
        weights = x.new_ones(x.shape[:-1], dtype=dtype) if weight is None else weight.to(dtype)
        total = (weights if mask is None else weights.masked_fill(~mask, 0)).sum()
        for i in self.sharded:
            total = funcol.all_reduce(total, "sum", (self.mesh, i))
        return total

    def by_token(self, t: Any) -> Any:
        return spread(t, self.mesh, self.rows, self.tokens)

    def summed(self, t: Any, shape: torch.Size) -> Any:
        return spread(t, self.mesh, [Partial() if isinstance(p, Shard) else R for p in self.rows], shape)

    def gradients(self, dinput: Any, dweight: Any, dbias: Any) -> tuple[Any, ...]:
        """Of a plain tensor: plain."""
        found = []
        for name, t in (("s_input", dinput), ("s_weight", dweight), ("s_bias", dbias)):
            like = self.given[name]
            if t is not None and isinstance(like, DTensor):
                t = spread(t, self.mesh, self.rows, like.shape) if name == "s_input" else self.summed(t, like.shape)
            found.append(t)
        return tuple(found)


TENSORS = ("s_input", "s_weight", "t_input", "t_weight", "s_bias", "t_bias", "mask", "token_weight")


def forward(wanted: int, reduction: str, memory_budget: int | None, given: dict[str, Any]) -> tuple[Any, ...]:
    tensors, options = {k: given[k] for k in TENSORS}, {k: v for k, v in given.items() if k not in TENSORS}
    call = Call(wanted, **tensors)
    found = torch.ops.liger._fused_linear_divergence_fwd(
        **call.parts, **options, total=call.total(reduction), reduction=reduction, memory_budget=memory_budget,
        wanted=wanted,
    )  # fmt: skip
    divergence, entropy, dinput, dweight, dbias, stats, deferred_scale = found
    mesh, columns = call.mesh, [Shard(1) if isinstance(p, Shard) else R for p in call.rows]
    return (
        call.by_token(divergence) if reduction == "none" else call.summed(divergence, torch.Size()),
        call.by_token(entropy),
        *call.gradients(dinput, dweight, dbias),
        # Only the backward half reads them, on the device that wrote them.
        None if stats is None else spread(stats, mesh, columns, (5, call.tokens.numel())),
        None if deferred_scale is None else spread(deferred_scale, mesh, (R,) * mesh.ndim, deferred_scale.shape),
    )


@on_dtensors("_fused_linear_divergence_fwd")
def forward_with_gradients(
    total: Any, wanted: int, reduction: str, memory_budget: int | None, **given: Any
) -> tuple[Any, ...]:
    return forward(wanted, reduction, memory_budget, given)


@on_dtensors("fused_linear_divergence")
def without_gradient(reduction: str, memory_budget: int | None, **given: Any) -> tuple[Any, ...]:
    return forward(0, reduction, memory_budget, given)[:2]


@on_dtensors("_fused_linear_divergence_bwd")
def backward(grad: Any, stats: Any, wanted: int, **given: Any) -> tuple[Any, ...]:
    tensors, options = {k: given[k] for k in TENSORS}, {k: v for k, v in given.items() if k not in TENSORS}
    call = Call(wanted, **tensors)
    if not isinstance(grad, DTensor):
        grad = DTensor.from_local(grad, call.mesh, (R,) * call.mesh.ndim, run_check=False)
    found = torch.ops.liger._fused_linear_divergence_bwd(
        grad.redistribute(call.mesh, call.rows)._local_tensor, **call.parts, **options,
        stats=stats._local_tensor if isinstance(stats, DTensor) else stats, wanted=wanted,
    )  # fmt: skip
    return call.gradients(*found)
