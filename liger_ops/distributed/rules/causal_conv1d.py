"""`x`: R or S(0); parameters: R -> as `x`; gradients: as `x`, of parameters P, or R if `x` is R.

`x`: S(2); parameters: S(0) -> as `x`; gradients: as the inputs.

The same with upstream gradient P; communication: the upstream gradient is reduced.

`seq_idx`, `cu_seqlens` and `initial_state` must be None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from ...reference._wanted import if_wanted
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
        results = if_wanted(wanted, rows, parameter, None if bias is None else parameter, None)
        yield results, dict(dy=rows, x=rows, weight=columns, bias=columns)
