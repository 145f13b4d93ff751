"""R or S of any dimension but the last, the same for both inputs -> as the inputs; gradient: the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._sharding import Layout, row_placements, sharding


@sharding("log_probs")
def forward(logits: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(logits):
        yield [rows, rows], dict(logits=rows, index=rows)


@sharding("_log_probs_fwd")
def forward_with_graph(logits: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(logits):
        yield [rows] * 4, dict(logits=rows, index=rows)


@sharding("_log_probs_bwd", reduced=("grad", "grad_entropy"))
def backward(logits: Any, **_: Any) -> Iterator[Layout]:
    for rows in row_placements(logits):
        yield [rows], dict(grad=rows, grad_entropy=rows, logits=rows, index=rows, stats=rows, chosen=rows)
