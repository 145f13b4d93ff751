"""GEMMs, as aten.mm is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from .._sharding import SUM, Layout, R, sharding


@sharding("_mm", reduced=("a", "b"))
def product(**_: Any) -> Iterator[Layout]:
    yield [R], dict(a=R, b=R)
    yield [Shard(0)], dict(a=Shard(0), b=R)
    yield [Shard(1)], dict(a=R, b=Shard(1))
    yield [SUM], dict(a=Shard(1), b=Shard(0))
    yield [SUM], dict(a=SUM, b=R)
    yield [SUM], dict(a=R, b=SUM)
