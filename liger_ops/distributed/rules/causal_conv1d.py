from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from ..._wanted import WANT_BIAS, WANT_INPUT, WANT_WEIGHT
from .._sharding import Layout, R, none_beside_dtensors, sharding, summed

# Of x, and of the parameters: whole, by batches, or by columns.
PLACEMENTS = (R, R), (Shard(0), R), (Shard(2), Shard(0))


@sharding("causal_conv1d")
def forward(seq_idx: Any, cu_seqlens: Any, initial_state: Any, **_: Any) -> Iterator[Layout]:
    none_beside_dtensors("causal_conv1d", seq_idx=seq_idx, cu_seqlens=cu_seqlens, initial_state=initial_state)
    for rows, columns in PLACEMENTS:
        yield [rows], dict(x=rows, weight=columns, bias=columns)


@sharding("_causal_conv1d_bwd", reduced=("dy",))
def backward(bias: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows, columns in PLACEMENTS:
        parameter = summed(rows) if columns == R else columns
        results = [
            rows if wanted & WANT_INPUT else None,
            parameter if wanted & WANT_WEIGHT else None,
            parameter if wanted & WANT_BIAS and bias is not None else None,
            None,
        ]
        yield results, dict(dy=rows, x=rows, weight=columns, bias=columns)
