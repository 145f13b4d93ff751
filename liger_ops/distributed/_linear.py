"""Rules of losses of a head, or of a student's and a teacher's: inputs (..., n), weights (V, n), biases (V,), and low-rank
inputs (..., r) and weights (V, r), which lie like inputs and weights.

Over one mesh dimension the heads may be Shard(0), by classes, all alike: inputs are replicated, or sharded along a sequence
and then gathered chunk by chunk, as their gradient is scattered. Over the others the heads are replicated and tokens may be
sharded, alike in all inputs: the gradients of weight and bias are partial sums.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from ..reference._wanted import WANT_BIAS, WANT_WEIGHT
from ._losses import Call, R, Result, placements_of, refuse, spread


class LinearCall(Call):
    WHOLE = (*Call.WHOLE, "ce_weight")
    INPUTS = tuple(p + name for p in ("", "s_", "t_") for name in ("input", "low_rank_input"))
    HEADS = tuple(p + name for p in ("", "s_", "t_") for name in ("weight", "bias", "low_rank_weight"))

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        super().__init__(op, given)
        self.prefix = prefix = "s_" if "s_input" in given else ""
        input, weight = given[f"{prefix}input"], given[f"{prefix}weight"]
        self.of_input, self.of_head = (placements_of(t, self.mesh) for t in (input, weight))
        split = self.sequence_dim = None
        for i, (x, w) in enumerate(zip(self.of_input, self.of_head)):
            along = x.dim if isinstance(x, Shard) else None
            if x.is_partial() or along == input.ndim - 1:
                refuse(op, f"{prefix}input", "be Replicate() or sharded along tokens", self.mesh, i, x)
            if w not in (Shard(0), R) or (w == Shard(0) and split is not None):
                refuse(op, f"{prefix}weight", "be Replicate(), or Shard(0) over one mesh dimension,", self.mesh, i, w)
            if w == Shard(0):
                split, self.sequence_dim = i, along
                if along is not None and input.shape[along] % self.mesh.size(i):
                    rule = f"have a multiple of {self.mesh.size(i)} positions along the sharded dimension {along}"
                    raise ValueError(f"{op}: {prefix}input must {rule} (got {input.shape[along]})")
        rows = [R if i == split else x for i, x in enumerate(self.of_input)]
        self.lay_out(rows, given.get("target", input).shape[: input.ndim - 1], weight.shape[0], split)
        if given["wanted"] & (WANT_WEIGHT | WANT_BIAS) and self.sharded and not isinstance(weight, DTensor):
            raise ValueError(f"{op}: {prefix}weight must be a DTensor where tokens are sharded (got a plain tensor)")

    def argument(self, name: str) -> Any:
        if name in self.INPUTS or name in self.HEADS:
            return self.part(name, self.of_input if name in self.INPUTS else self.of_head)
        return super().argument(name)

    def arguments(self) -> dict[str, Any]:
        return super().arguments() | dict(sequence_dim=self.sequence_dim)


def gradient(name: str) -> Result:
    def of_gradient(call: LinearCall, t: Tensor) -> Tensor:
        """Of a plain tensor: plain."""
        of_head = [Partial() if isinstance(p, Shard) else w for p, w in zip(call.rows, call.of_head)]
        like = call.given[call.prefix + name]
        found = spread(t, call.mesh, call.of_input if name.endswith("input") else of_head, like.shape)
        return found if isinstance(like, DTensor) else found.full_tensor()

    return of_gradient


GRADIENTS = tuple(map(gradient, ("input", "weight", "bias", "low_rank_input", "low_rank_weight")))
