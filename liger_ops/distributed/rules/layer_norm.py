"""`x`: R or S of any dimension but the last; parameters: R -> as `x`; gradients: as `x`, of parameters P.

`x`: S of the last dimension; parameters: R -> R; gradients: R; communication: `x` is gathered, in backward again.

The same with upstream gradient P; communication: the upstream gradient is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Placement, Shard

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, row_placements, sharding, summed


def of_statistics(rows: Placement) -> Placement:
    """Mean and reciprocal deviation: (2, ...)."""
    return Shard(rows.dim + 1) if isinstance(rows, Shard) else rows


@sharding("layer_norm", gathered=("x",))
def forward(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows], dict(x=rows, weight=R, bias=R)


@sharding("_layer_norm_fwd", gathered=("x",))
def forward_with_graph(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows, of_statistics(rows)], dict(x=rows, weight=R, bias=R)


@sharding("_layer_norm_bwd", reduced=("dy",), gathered=("x",))
def backward(x: Any, statistics: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        if of_statistics(rows) not in statistics.placements:  # backward runs where forward ran
            continue
        results = if_wanted(wanted, rows, summed(rows), summed(rows))
        yield results, dict(dy=rows, x=rows, weight=R, statistics=of_statistics(rows))
