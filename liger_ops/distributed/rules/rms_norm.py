from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._wanted import WANT_INPUT, WANT_WEIGHT
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
        results = [rows if wanted & WANT_INPUT else None, summed(rows) if wanted & WANT_WEIGHT else None]
        yield results, dict(dy=rows, ds=rows, x=rows, weight=R, rstd=rows)
