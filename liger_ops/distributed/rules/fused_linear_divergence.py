"""Inputs (..., H), weights (V, H). Over one mesh dimension the heads may be Shard(0), by classes, both alike: the inputs
are replicated, or sharded along a sequence and then gathered chunk by chunk, as the student's gradient is scattered. Over
the others the heads are replicated and tokens may be sharded, alike for both models: the student's gradients of weight and
bias are partial sums."""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from .._losses import R, Rows, part_of, placements_of, refuse, spread
from .._sharding import on_dtensors

OP = "fused_linear_divergence"
WEIGHT_OR_BIAS = 6  # bits of `wanted`
INPUTS, HEADS = ("s_input", "t_input"), ("s_weight", "t_weight", "s_bias", "t_bias")


class Call:
    """The layout of one call, and each device's part of its tensors."""

    def __init__(self, wanted: int, s_input: Any, s_weight: Any, s_bias: Any, **given: Any) -> None:
        tensors = dict(s_input=s_input, s_weight=s_weight, s_bias=s_bias, **given)
        self.mesh = mesh = next(t.device_mesh for t in tensors.values() if isinstance(t, DTensor))
        self.given = tensors
        self.of_input, self.of_head = placements_of(s_input, mesh), placements_of(s_weight, mesh)
        split, self.sequence_dim = None, None
        rows: list[Placement] = []
        for i, (x, w) in enumerate(zip(self.of_input, self.of_head)):
            along = x.dim if isinstance(x, Shard) else None
            if x.is_partial() or along == s_input.ndim - 1:
                refuse(OP, "s_input", "be Replicate() or sharded along tokens", mesh, i, x)
            if w not in (Shard(0), R) or (w == Shard(0) and split is not None):
                refuse(OP, "s_weight", "be Replicate(), or Shard(0) over one mesh dimension,", mesh, i, w)
            if w == Shard(0):
                split = i
                self.sequence_dim = along
                if along is not None and s_input.shape[along] % mesh.size(i):
                    rule = f"have a multiple of {mesh.size(i)} positions along the sharded dimension {along}"
                    raise ValueError(f"{OP}: s_input must {rule} (got {s_input.shape[along]})")
            rows.append(R if w == Shard(0) else x)
        self.rows = Rows(OP, mesh, tuple(rows), s_input.shape[:-1], s_weight.shape[0], split)
        for name in ("s_weight", "s_bias"):
            learned = wanted & WEIGHT_OR_BIAS and self.rows.sharded and tensors[name] is not None
            if learned and not isinstance(tensors[name], DTensor):
                raise ValueError(f"{OP}: {name} must be a DTensor where tokens are sharded (got a plain tensor)")
        layouts = dict.fromkeys(INPUTS, self.of_input) | dict.fromkeys(HEADS, self.of_head)
        self.parts = {
            name: part_of(OP, name, t, mesh, layouts.get(name, self.rows.placements)) for name, t in tensors.items()
        }
        self.split = dict(zip(("group", "classes", "class_sizes"), self.rows.group), sequence_dim=self.sequence_dim)

    def total(self, reduction: str) -> Any:
        """What a mean over the tokens of all devices divides by; None if each device has all tokens."""
        if reduction != "mean" or not self.rows.sharded:
            return None
        x, mask, weight = (self.parts[name] for name in ("s_input", "mask", "token_weight"))
        dtype = torch.promote_types(x.dtype, torch.float32)
        tokens = list(x.shape[:-1])
        if self.sequence_dim is not None:
            tokens[self.sequence_dim] *= self.mesh.size(self.rows.split)
        weights = x.new_ones(tokens, dtype=dtype) if weight is None else weight.to(dtype)
        total = (weights if mask is None else weights.masked_fill(~mask, 0)).sum()
        for i in self.rows.sharded:
            total = funcol.all_reduce(total, "sum", (self.mesh, i))
        return total

    def gradients(self, dinput: Any, dweight: Any, dbias: Any) -> tuple[Any, ...]:
        """Of a plain tensor: plain."""
        of_head = [Partial() if isinstance(p, Shard) else w for p, w in zip(self.rows.placements, self.of_head)]
        layouts = dict(s_input=self.of_input, s_weight=of_head, s_bias=of_head)

        def lie(name: str, t: Any) -> Any:
            if t is None:
                return None
            like = self.given[name]
            found = spread(t, self.mesh, layouts[name], like.shape)
            return found if isinstance(like, DTensor) else found.full_tensor()

        return lie("s_input", dinput), lie("s_weight", dweight), lie("s_bias", dbias)


TENSORS = ("s_input", "s_weight", "t_input", "t_weight", "s_bias", "t_bias", "mask", "token_weight")


def forward(wanted: int, reduction: str, memory_budget: int | None, given: dict[str, Any]) -> tuple[Any, ...]:
    tensors, options = {k: given[k] for k in TENSORS}, {k: v for k, v in given.items() if k not in TENSORS}
    call = Call(wanted, **tensors)
    found = torch.ops.liger._fused_linear_divergence_fwd(
        **call.parts, **options, **call.split, total=call.total(reduction), reduction=reduction,
        memory_budget=memory_budget, wanted=wanted,
    )  # fmt: skip
    divergence, entropy, dinput, dweight, dbias, stats, deferred_scale = found
    rows = call.rows
    return (
        rows.spread(divergence, reduction != "none"),
        rows.spread(entropy),
        *call.gradients(dinput, dweight, dbias),
        rows.spread_statistics(stats),
        rows.replicated(deferred_scale),
    )


@on_dtensors("_fused_linear_divergence_fwd")
def forward_with_gradients(
    total: Any, group: str, classes: int, class_sizes: Any, sequence_dim: int | None, wanted: int, reduction: str,
    memory_budget: int | None, **given: Any,
) -> tuple[Any, ...]:  # fmt: skip
    return forward(wanted, reduction, memory_budget, given)


@on_dtensors("fused_linear_divergence")
def without_gradient(reduction: str, memory_budget: int | None, **given: Any) -> tuple[Any, ...]:
    return forward(0, reduction, memory_budget, given)[:2]


@on_dtensors("_fused_linear_divergence_bwd")
def backward(
    grad: Any, stats: Any, group: str, classes: int, class_sizes: Any, sequence_dim: int | None, wanted: int, **given: Any
) -> tuple[Any, ...]:  # fmt: skip
    tensors, options = {k: given[k] for k in TENSORS}, {k: v for k, v in given.items() if k not in TENSORS}
    call = Call(wanted, **tensors)
    found = torch.ops.liger._fused_linear_divergence_bwd(
        call.rows.upstream(grad, False), **call.parts, **options, **call.split,
        stats=stats._local_tensor if isinstance(stats, DTensor) else stats, wanted=wanted,
    )  # fmt: skip
    return call.gradients(*found)
