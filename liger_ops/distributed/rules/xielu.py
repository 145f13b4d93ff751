"""`x`: R or S of any dimension; numbers: R -> as `x`; gradients: as `x`, of numbers P.

R with upstream gradient P -> R; gradients: P.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference._wanted import if_wanted
from .._sharding import SUM, Layout, R, any_placements, sharding, summed


@sharding("xielu")
def forward(x: Any, **_: Any) -> Iterator[Layout]:
    for part in any_placements(x):
        yield [part], dict(x=part, alpha_p=R, alpha_n=R)


@sharding("_xielu_bwd", reduced=("dy",))
def backward(x: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    layouts = [(part, part, summed(part)) for part in any_placements(x)]
    for dy, of_x, of_numbers in [(SUM, R, SUM), *layouts]:
        results = if_wanted(wanted, dy, of_numbers, of_numbers)
        yield results, dict(dy=dy, x=of_x, alpha_p=R, alpha_n=R)
