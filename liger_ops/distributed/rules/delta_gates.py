"""`a`, `b`: R or S of any dimension of `b`; parameters: R, or S(0) if the heads are split -> as `a` and `b`; gradients:
as `a` and `b`, of parameters P, or as the parameters if they are split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, column_placements, sharding, summed


@sharding("delta_gates")
def forward(b: Any, **_: Any) -> Iterator[Layout]:
    for rows, heads in column_placements(b):
        yield [rows, rows], dict(a=rows, b=rows, a_log=heads, dt_bias=heads)


@sharding("_delta_gates_bwd", reduced=("dg", "dbeta"))
def backward(b: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows, heads in column_placements(b):
        parameter = summed(rows) if heads == R else heads
        results = if_wanted(wanted, rows, rows, parameter, parameter)
        yield results, dict(dg=rows, dbeta=rows, a=rows, b=rows, a_log=heads, dt_bias=heads)
