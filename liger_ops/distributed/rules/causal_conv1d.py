from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Placement, Shard

from ..._wanted import WANT_BIAS, WANT_INPUT, WANT_STATE, WANT_WEIGHT
from .._sharding import Layout, R, sharding, summed


def placements(cu_seqlens: Any) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Of x, of the parameters and of seq_idx: whole, by columns, or by batches."""
    yield R, R, R
    yield Shard(2), Shard(0), R
    if cu_seqlens is None:
        yield Shard(0), R, Shard(0)


@sharding("causal_conv1d")
def forward(x: Any, cu_seqlens: Any = None, **_: Any) -> Iterator[Layout]:
    for rows, columns, samples in placements(cu_seqlens):
        given = dict(x=rows, weight=columns, bias=columns, seq_idx=samples, cu_seqlens=R, initial_state=rows)
        yield [rows], given


@sharding("_causal_conv1d_bwd", reduced=("dy",))
def backward(x: Any, bias: Any, initial_state: Any, cu_seqlens: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for rows, columns, samples in placements(cu_seqlens):
        parameter = summed(rows) if columns == R else columns
        results = [
            rows if wanted & WANT_INPUT else None,
            parameter if wanted & WANT_WEIGHT else None,
            parameter if wanted & WANT_BIAS and bias is not None else None,
            rows if wanted & WANT_STATE and initial_state is not None else None,
        ]
        given = dict(x=rows, weight=columns, bias=columns, seq_idx=samples, cu_seqlens=R, initial_state=rows)
        yield results, dict(dy=rows, **given)
