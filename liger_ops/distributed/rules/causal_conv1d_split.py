"""`x`: R or S(0); parameters: R -> as `x`; gradients: as `x`, of parameters P, or R if `x` is R.

`seq_idx`, `cu_seqlens` and `initial_state` must be None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, none_beside_dtensors, sharding, summed

# Of x: whole, or by batches. Columns of a shard would be those of fewer groups than `groups`.
PLACEMENTS = R, Shard(0)


@sharding("_causal_conv1d_split_fwd")
def forward(seq_idx: Any, cu_seqlens: Any, initial_state: Any, **_: Any) -> Iterator[Layout]:
    none_beside_dtensors("causal_conv1d_split", seq_idx=seq_idx, cu_seqlens=cu_seqlens, initial_state=initial_state)
    for rows in PLACEMENTS:
        yield [rows] * 3, dict(x=rows, weight=R, bias=R)


@sharding("_causal_conv1d_split_bwd")
def backward(bias: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows in PLACEMENTS:
        results = if_wanted(wanted, rows, summed(rows), None if bias is None else summed(rows), None)
        yield results, dict(dq=rows, dk=rows, dv=rows, dz=rows, x=rows, weight=R, bias=R)
