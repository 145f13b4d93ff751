"""R or S of any dimension -> as `x`; gradient: the same.

R with upstream gradient P -> R; gradient: P.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._sharding import SUM, Layout, R, any_placements, sharding


@sharding("relu_squared")
def forward(x: Any, **_: Any) -> Iterator[Layout]:
    for part in any_placements(x):
        yield [part], dict(x=part)


@sharding("_relu_squared_bwd", reduced=("dy",))
def backward(x: Any, **_: Any) -> Iterator[Layout]:
    yield [SUM], dict(dy=SUM, x=R)
    for part in any_placements(x):
        yield [part], dict(dy=part, x=part)
