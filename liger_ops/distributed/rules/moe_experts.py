"""moe_experts: `x`, `index`, `weight`: R or S(0); weights, biases, adapters: R -> as `x`; gradients: of `x` and
`weight` the same, of weights, biases and adapters P where tokens are sharded.

Tokens and routing: R; weights, biases, adapters: S(0), by expert -> P; gradients: of `x` and `weight` P, of weights,
biases and adapters S(0).

Tokens and routing: R; `gate_up`, `down`, `gate_up_bias`, `gate_up_b`, `down_a`: S of the inner size; `down_bias`,
`gate_up_a`, `down_b`: R -> P; gradients: of `x`, `weight`, `gate_up_a` and `down_b` P, of others as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from .._losses import R, part_of, placements_of, refuse, spread
from .._sharding import SUM, is_strided, on_dtensors, text_of

ROUTED, SORTED = "moe_experts", "moe_experts_sorted"
BIASES, ADAPTERS = ("gate_up_bias", "down_bias"), ("gate_up_a", "gate_up_b", "down_a", "down_b")
PARAMETERS = ("gate_up", "down", *BIASES, *ADAPTERS)
# Whole on each device if the inner size is sharded, where their gradients are partial sums.
SPANNING = ("gate_up_a", "down_b")
SCALES = ("gate_up_scale", "down_scale")
OPTIONS = ("activation", "interleaved", "transposed", "limit", "alpha", "up_offset")


class Call:
    """The layout of one call. given: its arguments by name.

    Each mesh dimension may shard tokens, experts, or the inner size of all experts. Experts: ids become those of this
    device's experts. Ids of other devices' experts fall outside of its range, and the operator drops them. Inner size: a
    device needs the same columns of gate and up. Both give partial sums.
    """

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        self.op, self.given, self.x, self.gate_up = op, given, given["x"], given["gate_up"]
        for name in PARAMETERS:
            if given.get(name) is not None and not isinstance(given[name], DTensor):
                raise ValueError(f"{op}: {name} must be a DTensor like the other arguments (got a plain tensor)")
        self.mesh = self.gate_up.device_mesh
        columns, rows = (2, 1) if given["transposed"] else (1, 2)
        # Of the inner size.
        self.dims = {"gate_up": columns, "down": rows, "gate_up_bias": 1, "gate_up_b": 1, "down_a": 2}
        self.inner = given["down"].shape[rows]
        self.kinds = [self.kind(i) for i in range(self.mesh.ndim)]
        self.layouts = {name: [self.layout(name, i) for i in range(self.mesh.ndim)] for name in PARAMETERS}
        for name in PARAMETERS:
            for i, wanted in enumerate(self.layouts[name]):
                if given.get(name) is not None and given[name].placements[i] != wanted:
                    refuse(op, name, f"be {text_of(wanted)}", self.mesh, i, given[name].placements[i])
        self.rows = self.placements(tokens=Shard(0))
        self.shares = self.placements(tokens=Shard(0), experts=SUM, inner=SUM)

    def placements(self, **by_kind: Placement) -> list[Placement]:
        return [by_kind.get(kind, R) for kind in self.kinds]

    # ---- What each mesh dimension shards

    def kind(self, i: int) -> str:
        of_x, of_gate_up = placements_of(self.x, self.mesh)[i], self.gate_up.placements[i]
        if of_gate_up == R:
            if of_x == Shard(0) and self.op == ROUTED:
                return "tokens"
            if of_x != R:
                rule = "be Replicate()" if self.op == SORTED else "be Replicate() or Shard(0)"
                refuse(self.op, "x", rule, self.mesh, i, of_x)
            return "replicated"
        kind = "experts" if of_gate_up == Shard(0) else "inner"
        if kind == "inner":
            self.check_inner(i, of_gate_up)
        if of_x != R:
            what = "experts are" if kind == "experts" else "the inner size is"
            refuse(self.op, "x", f"be Replicate(), as {what} sharded,", self.mesh, i, of_x)
        return kind

    def check_inner(self, i: int, placement: Any) -> None:
        dim, parts = self.dims["gate_up"], self.mesh.size(i)
        if self.given["interleaved"]:
            fits, rule = placement == Shard(dim), f"be Replicate(), Shard(0) or Shard({dim})"
        else:  # Shard would give a device columns of gate or of up
            fits = is_strided(placement) and (placement.dim, placement.split_factor) == (dim, 2)
            rule = f"be Replicate(), Shard(0) or _StridedShard({dim}, split_factor=2), as gate and up are halves,"
        if not fits:
            refuse(self.op, "gate_up", rule, self.mesh, i, placement)
        if placement in self.gate_up.placements[:i]:
            refuse(self.op, "gate_up", "have its inner size sharded once, not again", self.mesh, i, placement)
        if self.inner % parts:
            rule = f"have an inner size divisible by {parts}, not {self.inner},"
            refuse(self.op, "gate_up", rule, self.mesh, i, placement)

    def layout(self, name: str, i: int) -> Placement:
        """Of a parameter."""
        if self.kinds[i] == "experts":
            return Shard(0)
        if self.kinds[i] != "inner" or name not in self.dims:
            return R
        of_gate_up = self.gate_up.placements[i]
        if name in ("down", "down_a") or self.given["interleaved"]:
            return Shard(self.dims[name])
        return type(of_gate_up)(self.dims[name], split_factor=2)

    @cached_property
    def first(self) -> int:
        """This device's first expert. Experts are split as torch.chunk does."""
        first, size = 0, self.gate_up.shape[0]
        for i, kind in enumerate(self.kinds):
            if kind == "experts":
                part = -(-size // self.mesh.size(i))
                skipped = min(self.mesh.get_local_rank(i) * part, size)
                first, size = first + skipped, min(part, size - skipped)
        return first

    # ---- Arguments of this device

    def part(self, name: str, placements: Sequence[Placement]) -> Any:
        return part_of(self.op, name, self.given.get(name), self.mesh, placements)

    def parameter(self, name: str) -> Any:
        t = None if self.given.get(name) is None else self.given[name]._local_tensor
        ranks = [self.mesh.get_local_rank(i) for i, kind in enumerate(self.kinds) if kind == "inner"]
        # One of the devices that share an expert adds it.
        return torch.zeros_like(t) if t is not None and name == "down_bias" and any(ranks) else t

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.part("x", self.rows), self.parameter("gate_up"), self.parameter("down")

    @property
    def biases(self) -> tuple[Any, Any]:
        return self.parameter("gate_up_bias"), self.parameter("down_bias")

    @property
    def adapters(self) -> tuple[Any, ...]:
        return tuple(map(self.parameter, ADAPTERS))

    @property
    def scales(self) -> tuple[float, float]:
        return self.given["gate_up_scale"], self.given["down_scale"]

    @property
    def named(self) -> dict[str, Any]:
        """Options and adapters."""
        values = (*self.options, *self.adapters, *self.scales)
        return dict(zip((*OPTIONS, *ADAPTERS, *SCALES), values, strict=True))

    @property
    def options(self) -> tuple[Any, ...]:
        return tuple(self.given[name] for name in OPTIONS)

    @property
    def is_split_by_expert(self) -> bool:
        return "experts" in self.kinds

    def routes(self) -> tuple[Tensor, Tensor]:
        index = self.part("index", self.rows)
        return index - self.first if self.is_split_by_expert else index, self.part("weight", self.rows)

    def routes_of_sorted_rows(self) -> tuple[Tensor, Tensor]:
        """As tokens of one expert each: this device's rows come after those of other devices' experts."""
        ends = self.part("tokens_per_expert", self.rows).clamp_min(0).cumsum(0)
        row = torch.arange(self.x.shape[0], device=ends.device)
        index = (torch.searchsorted(ends, row, right=True) - self.first).int().unsqueeze(1)
        return index, self.weights_of_sorted_rows(index)

    def weights_of_sorted_rows(self, index: Tensor) -> Tensor:
        return torch.ones(index.shape, dtype=self.x.dtype, device=index.device)

    # ---- Results

    def out(self, t: Tensor) -> DTensor:
        return spread(t, self.mesh, self.shares, self.x.shape)

    def saved(self, t: Tensor) -> DTensor:
        """Only the backward half reads it, on the device that wrote it."""
        return spread(t, self.mesh, (R,) * self.mesh.ndim, t.shape)

    def gradient(self, name: str, t: Tensor | None) -> Any:
        """Of a plain tensor: plain."""
        if t is None:
            return None
        if name not in PARAMETERS:
            found = spread(t, self.mesh, self.shares, self.given[name].shape)
            return found if isinstance(self.given[name], DTensor) else found.full_tensor()
        summed = ("tokens", "inner") if name in SPANNING else ("tokens",)
        placements = [SUM if kind in summed else p for kind, p in zip(self.kinds, self.layouts[name])]
        biases = {"gate_up_bias": 2 * self.inner, "down_bias": self.x.shape[1]}
        shape = (self.gate_up.shape[0], biases[name]) if name in biases else self.given[name].shape
        return spread(t, self.mesh, placements, shape)

    def gradients(self, found: Sequence[Tensor | None]) -> tuple[Any, ...]:
        names = ("x", "gate_up", "down", "weight", *BIASES, *ADAPTERS)
        return tuple(self.gradient(name, t) for name, t in zip(names, found, strict=True))


@on_dtensors(ROUTED)
def without_gradient(**given: Any) -> DTensor:
    call = Call(ROUTED, given)
    named = call.named | {"weight_before": given["weight_before"]}
    return call.out(torch.ops.liger.moe_experts(*call.weights, *call.routes(), *call.biases, **named))


@on_dtensors("_moe_experts_fwd")
def forward(**given: Any) -> tuple[DTensor, ...]:
    call = Call(ROUTED, given)
    out, *saved = torch.ops.liger._moe_experts_fwd(
        *call.weights, *call.routes(), *call.biases, *call.options, given["weight_before"], *call.adapters, *call.scales
    )
    return call.out(out), *map(call.saved, saved)


@on_dtensors(SORTED)
def sorted_without_gradient(**given: Any) -> DTensor:
    call = Call(SORTED, given)
    if call.is_split_by_expert:
        routes = call.routes_of_sorted_rows()
        return call.out(torch.ops.liger.moe_experts(*call.weights, *routes, *call.biases, **call.named))
    counts = call.part("tokens_per_expert", call.rows)
    return call.out(torch.ops.liger.moe_experts_sorted(*call.weights, counts, *call.biases, **call.named))


@on_dtensors("_moe_experts_sorted_fwd")
def sorted_forward(**given: Any) -> tuple[DTensor, ...]:
    call = Call(SORTED, given)
    last = *call.adapters, *call.scales
    if not call.is_split_by_expert:
        counts = call.part("tokens_per_expert", call.rows)
        out, pre, routing, t = torch.ops.liger._moe_experts_sorted_fwd(
            *call.weights, counts, *call.biases, *call.options, *last
        )
    else:
        index, weight = call.routes_of_sorted_rows()
        out, pre, routing, t = torch.ops.liger._moe_experts_fwd(
            *call.weights, index, weight, *call.biases, *call.options, False, *last
        )
        routing = torch.cat([routing, index.flatten()])  # for backward, which gets no counts
    return call.out(out), *map(call.saved, (pre, routing, t))


@on_dtensors("_moe_experts_bwd")
def backward(**given: Any) -> tuple[Any, ...]:
    is_sorted = given["weight"] is None
    call = Call(SORTED if is_sorted else ROUTED, given)
    routing = given["routing"]._local_tensor
    index, weight = (None, None) if is_sorted else call.routes()
    if is_sorted and call.is_split_by_expert:
        routing, ids = routing.split([routing.shape[0] - call.x.shape[0], call.x.shape[0]])
        index = ids.unsqueeze(1)
        weight = call.weights_of_sorted_rows(index)
    dout = given["dout"].redistribute(call.mesh, call.rows)._local_tensor
    pre, t = given["pre"]._local_tensor, given["t"]._local_tensor
    return call.gradients(
        torch.ops.liger._moe_experts_bwd(
            dout, *call.weights, index, weight, call.parameter("down_bias"), *call.adapters, pre, routing, t,
            given["wanted"], *call.options, given["weight_before"], *call.scales,
        )
    )  # fmt: skip
