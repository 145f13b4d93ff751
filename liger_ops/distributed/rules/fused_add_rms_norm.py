"""`x`, `residual`: R or S of any dimension but the last; `weight`: R -> as `x`; gradients: as `x`, of `weight` P."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._sharding import Layout, R, row_placements, sharding


@sharding("fused_add_rms_norm")
def forward(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows, rows], dict(x=rows, residual=rows, weight=R)


@sharding("_fused_add_rms_norm_fwd")
def forward_with_graph(x: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(x):
        yield [rows, rows, rows], dict(x=rows, residual=rows, weight=R)
