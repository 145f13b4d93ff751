"""`x`: R or S of any dimension but the last; `weight`: R -> as `x`; gradients: as `x`, of `weight` P.

`x`: S of the last dimension; `weight`: R -> R; gradients: R; communication: `x` is gathered, in backward again.

The same with upstream gradient P; communication: the upstream gradient is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, row_placements, sharding, summed


@sharding("rms_norm", gathered=("x",))
def forward(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows], dict(x=rows, weight=R)


@sharding("_rms_norm_fwd", gathered=("x",))
def forward_with_graph(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows, rows], dict(x=rows, weight=R)


@sharding("_rms_norm_bwd", reduced=("dy", "ds"), gathered=("x",))
def backward(rstd: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    """Shared with fused_add_rms_norm. `ds` is the gradient of the sum, which the norm's is added to."""
    for rows in dict.fromkeys(rstd.placements):  # backward runs where forward ran
        yield if_wanted(wanted, rows, summed(rows)), dict(dy=rows, ds=rows, x=rows, weight=R, rstd=rows)
