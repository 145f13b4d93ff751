from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._wanted import WANT_BIAS, WANT_INPUT, WANT_WEIGHT
from .._sharding import SUM, Layout, R, any_placements, sharding, summed


@sharding("xielu")
def forward(x: Any, **_: Any) -> Iterator[Layout]:
    for part in any_placements(x):
        yield [part], dict(x=part, alpha_p=R, alpha_n=R)


@sharding("_xielu_bwd", reduced=("dy",))
def backward(x: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    layouts = [(part, part, summed(part)) for part in any_placements(x)]
    for dy, of_x, of_numbers in [(SUM, R, SUM), *layouts]:
        placements = {WANT_INPUT: dy, WANT_WEIGHT: of_numbers, WANT_BIAS: of_numbers}
        results = [placement if wanted & bit else None for bit, placement in placements.items()]
        yield results, dict(dy=dy, x=of_x, alpha_p=R, alpha_n=R)
