"""quantize_rows: R or S of any dimension but the last -> as `x`.

quantize_blocks: block "1x128": R or S of any dimension but the last -> as `x`.

quantize_blocks: block "128x128": R -> R.

quantize_columns: R -> R.

quantize_columns: S of the last dimension -> S(0).

quantize_both: R -> R.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from .._sharding import Layout, R, row_placements, sharding


@sharding("quantize_rows")
def rows(x: Any, **_: Any) -> Iterator[Layout]:
    for part in row_placements(x):
        yield [part, part], dict(x=part)


@sharding("quantize_blocks")
def blocks(x: Any, block: str, **_: Any) -> Iterator[Layout]:
    """Scales of 128 x 128 need neighbouring rows."""
    for part in row_placements(x) if block == "1x128" else [R]:
        yield [part, part], dict(x=part)


@sharding("quantize_columns")
def columns(x: Any, **_: Any) -> Iterator[Layout]:
    yield [R, R], dict(x=R)
    yield [Shard(0), Shard(0)], dict(x=Shard(x.ndim - 1))


@sharding("quantize_both")
def both(x: Any, **_: Any) -> Iterator[Layout]:
    """Scales of rows need whole rows, and those of columns whole columns."""
    yield [R, R, R, R], dict(x=R)
