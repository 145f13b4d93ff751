from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from ..._wanted import WANT_BIAS, WANT_INPUT, WANT_STEP, WANT_WEIGHT
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
        placements = {WANT_INPUT: rows, WANT_STEP: rows, WANT_WEIGHT: parameter, WANT_BIAS: parameter}
        results = [placement if wanted & bit else None for bit, placement in placements.items()]
        yield results, dict(dg=rows, dbeta=rows, a=rows, b=rows, a_log=heads, dt_bias=heads)
