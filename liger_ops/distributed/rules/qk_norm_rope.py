from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._wanted import WANT_INPUT, WANT_WEIGHT
from .._sharding import Layout, R, sharding, summed
from . import rope

NONE = [None, None]


@sharding("qk_norm_rope")
def forward(q: Any, cos: Any, **_: Any) -> Iterator[Layout]:
    """q, k, cos, sin: as for rope; weights: (D,)."""
    for results, arguments in rope.forward(q=q, cos=cos):
        yield results, dict(arguments, q_weight=R, k_weight=R)


@sharding("_qk_norm_rope_bwd", reduced=("grad_q", "grad_k"))
def backward(q: Any, cos: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for results, arguments in forward(q=q, cos=cos):
        of_q, of_k = arguments["q"], arguments["k"]
        weights = [summed(of_q), summed(of_k)]
        gradients = [*(results if wanted & WANT_INPUT else NONE), *(weights if wanted & WANT_WEIGHT else NONE)]
        yield gradients, dict(arguments, grad_q=of_q, grad_k=of_k)
