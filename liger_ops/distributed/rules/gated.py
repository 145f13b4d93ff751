"""swiglu, geglu: R or S of any dimension, the same for all inputs -> as the inputs; gradients: the same.

swiglu_packed, geglu_packed: R or S of any dimension but the last -> as the input; gradient: the same.

swiglu, geglu, swiglu_packed, geglu_packed: R with upstream gradient P -> R; gradients: P.

swiglu_linear, geglu_linear: `gate`, `up`: R or S(0); `weight`: R -> as `gate`; gradients: as the inputs, of parameters
P.

swiglu_linear, geglu_linear: `gate`, `up`: S of the last dimension; `weight`: S(1) -> P; gradients: as the inputs.

swiglu_linear, geglu_linear: `gate`, `up`: R; `weight`: S(0) -> S of the last dimension; gradients: of `gate` and `up`
P, of `weight` S(0).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from .._sharding import SUM, Layout, R, any_placements, row_placements, sharding


@sharding("swiglu", "geglu")
def forward(gate: Any, **_: Any) -> Iterator[Layout]:
    for part in any_placements(gate):
        yield [part], dict(gate=part, up=part)


@sharding("_swiglu_bwd", "_geglu_bwd", reduced=("dout",))
def backward(gate: Any, **_: Any) -> Iterator[Layout]:
    yield [SUM, SUM], dict(dout=SUM, gate=R, up=R)
    for part in any_placements(gate):
        yield [part, part], dict(dout=part, gate=part, up=part)


@sharding("swiglu_packed", "geglu_packed")
def packed(gate_up: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(gate_up):
        yield [rows], dict(gate_up=rows)


@sharding("_swiglu_packed_bwd", "_geglu_packed_bwd", reduced=("dout",))
def packed_backward(gate_up: Any, **_: Any) -> Iterator[Layout]:
    yield [SUM], dict(dout=SUM, gate_up=R)
    for rows in row_placements(gate_up):
        yield [rows], dict(dout=rows, gate_up=rows)


@sharding("swiglu_linear", "geglu_linear")
def linear(gate: Any, bias: Any, **_: Any) -> Iterator[Layout]:
    """Backward flattens all dimensions but the last, which no dimension but the first may be sharded for."""
    columns = Shard(gate.ndim - 1)
    for rows in (R, Shard(0)) if gate.ndim > 1 else (R,):
        yield [rows], dict(gate=rows, up=rows, weight=R, bias=R)
    yield [columns], dict(gate=R, up=R, weight=Shard(0), bias=Shard(0))
    if bias is None:
        yield [SUM], dict(gate=columns, up=columns, weight=Shard(1))


@sharding("_swiglu_product_bwd", "_geglu_product_bwd", reduced=("dout",))
def product_backward(gate: Any, **_: Any) -> Iterator[Layout]:
    """Gradients of gate and up, and their product."""
    yield [SUM, SUM, R], dict(dout=SUM, gate=R, up=R)
    for part in any_placements(gate):
        yield [part, part, part], dict(dout=part, gate=part, up=part)
