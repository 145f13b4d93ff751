"""`a`, `b`: R or S of any dimension of `b`; parameters: R, or S(0) if the heads are split -> as `a` and `b`; gradients:
as `a` and `b`, of parameters P, or as the parameters if they are split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, any_placements, sharding, summed


def placements_of(b: Any) -> Iterator[Any]:
    """Of a and b, and of the parameters, which have the last dimension of b as their first."""
    for rows in any_placements(b):
        yield rows, Shard(0) if rows == Shard(b.ndim - 1) else R


@sharding("delta_gates")
def forward(b: Any, **_: Any) -> Iterator[Layout]:
    for rows, heads in placements_of(b):
        yield [rows, rows], dict(a=rows, b=rows, a_log=heads, dt_bias=heads)


@sharding("_delta_gates_bwd", reduced=("dg", "dbeta"))
def backward(b: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows, heads in placements_of(b):
        parameter = summed(rows) if heads == R else heads
        results = if_wanted(wanted, rows, rows, parameter, parameter)
        yield results, dict(dg=rows, dbeta=rows, a=rows, b=rows, a_log=heads, dt_bias=heads)
