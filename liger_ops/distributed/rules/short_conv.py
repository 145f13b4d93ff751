"""`bcx`: R or S(0); parameters: R -> as `bcx`; gradients: as `bcx`, of parameters P, or R if `bcx` is R.

`seq_idx` and `cu_seqlens` must be None.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, none_beside_dtensors, sharding, summed

# Of bcx: whole, or by batches. Columns of a shard would not be those of the same channels.
PLACEMENTS = R, Shard(0)


@sharding("short_conv")
def forward(seq_idx: Any, cu_seqlens: Any, **_: Any) -> Iterator[Layout]:
    none_beside_dtensors("short_conv", seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    for rows in PLACEMENTS:
        yield [rows], dict(bcx=rows, weight=R, bias=R)


@sharding("_short_conv_bwd", reduced=("dy",))
def backward(bias: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows in PLACEMENTS:
        results = if_wanted(wanted, rows, summed(rows), None if bias is None else summed(rows))
        yield results, dict(dy=rows, bcx=rows, weight=R, bias=R)
