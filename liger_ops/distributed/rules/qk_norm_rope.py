"""As for :func:`rope`; weights: R -> as `q` and `k`; gradients: as `q` and `k`, of weights P, or R if their heads are
R.

The same with upstream gradient P; communication: the upstream gradient is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, sharding, summed
from . import rope


@sharding("qk_norm_rope")
def forward(q: Any, cos: Any, **_: Any) -> Iterator[Layout]:
    """q, k, cos, sin: as for rope; weights: (D,)."""
    for results, arguments in rope.forward(q=q, cos=cos):
        yield results, dict(arguments, q_weight=R, k_weight=R)


@sharding("_qk_norm_rope_bwd", reduced=("grad_q", "grad_k"))
def backward(q: Any, cos: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for results, arguments in forward(q=q, cos=cos):
        of_q, of_k = arguments["q"], arguments["k"]
        gradients = if_wanted(wanted, *results, summed(of_q), summed(of_k))
        yield gradients, dict(arguments, grad_q=of_q, grad_k=of_k)
