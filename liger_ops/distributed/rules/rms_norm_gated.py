"""`x`, `gate`: R or S of any dimension but the last; `weight`: R -> as `x`; gradients: as `x`, of `weight` P.

The same with upstream gradient P; communication: the upstream gradient is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, row_placements, sharding, summed


@sharding("rms_norm_gated", gathered=("x",))
def forward(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows], dict(x=rows, gate=rows, weight=R)


@sharding("_rms_norm_gated_fwd", gathered=("x",))
def forward_with_graph(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows, rows], dict(x=rows, gate=rows, weight=R)


@sharding("_rms_norm_gated_bwd", reduced=("dy",), gathered=("x",))
def backward(x: Any, rstd: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        if rows not in rstd.placements:  # backward runs where forward ran
            continue
        results = if_wanted(wanted, rows, rows, summed(rows))
        yield results, dict(dy=rows, x=rows, gate=rows, weight=R, rstd=rows)
