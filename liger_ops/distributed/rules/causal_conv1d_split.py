from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from ..._wanted import WANT_BIAS, WANT_INPUT, WANT_WEIGHT
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
        results = [
            rows if wanted & WANT_INPUT else None,
            summed(rows) if wanted & WANT_WEIGHT else None,
            summed(rows) if wanted & WANT_BIAS and bias is not None else None,
            None,
        ]
        yield results, dict(dq=rows, dk=rows, dv=rows, dz=rows, x=rows, weight=R, bias=R)
