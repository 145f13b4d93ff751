"""`logits`: R or S of any dimension but the last; `token_weight`, `experts`: as the rows; `bias`: R -> weights and
indices: as `logits`, statistics: P where rows are sharded; gradient: as `logits`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._sharding import Layout, R, row_placements, sharding, summed


@sharding("moe_router")
def forward(logits: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(logits):
        total = summed(rows)
        yield [rows, rows, total, total, total], dict(logits=rows, bias=R, token_weight=rows, experts=rows)


@sharding("_moe_router_bwd", reduced=("grad",))
def backward(logits: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(logits):
        gradients = dict(grad=rows, grad_scores=R, grad_z=R)
        yield [rows], gradients | dict(logits=rows, index=rows, token_weight=rows)
