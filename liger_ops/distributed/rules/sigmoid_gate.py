"""R or S of any dimension, but the last only if the gate has a number per element, the same for all inputs -> as the
inputs; gradients: the same.

R with upstream gradient P -> R; gradients: P.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference._wanted import if_wanted
from .._sharding import SUM, Layout, R, any_placements, row_placements, sharding


def parts_of(x: Any, gate: Any) -> Iterator[Any]:
    return any_placements(x) if gate.shape == x.shape else row_placements(x)


@sharding("sigmoid_gate")
def forward(x: Any, gate: Any, **_: Any) -> Iterator[Layout]:
    for part in parts_of(x, gate):
        yield [part], dict(x=part, gate=part, residual=part)


@sharding("_sigmoid_gate_bwd", reduced=("dout",))
def backward(x: Any, gate: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for dout, of_inputs in [(SUM, R), *((part, part) for part in parts_of(x, gate))]:
        yield if_wanted(wanted, dout, dout), dict(dout=dout, x=of_inputs, gate=of_inputs)
