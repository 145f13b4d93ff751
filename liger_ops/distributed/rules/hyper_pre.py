"""`streams`: R or S of any dimension but the last two; parameters: R -> as `streams`; gradients: as `streams`, of
parameters P."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Placement, Shard

from ...reference._wanted import if_wanted
from .._sharding import Layout, R, sharding, summed

PARAMETERS = dict(fn=R, base=R, scale=R)


def token_placements(streams: Any) -> Iterator[Placement]:
    """Of operators that work on the streams of each token."""
    yield R
    yield from (Shard(d) for d in range(streams.ndim - 2))


@sharding("hyper_pre")
def forward(streams: Any, **_: Any) -> Iterator[Layout]:
    for tokens in token_placements(streams):
        yield [tokens] * 3, dict(streams=tokens, **PARAMETERS)


@sharding("_hyper_pre_fwd")
def forward_with_graph(streams: Any, **_: Any) -> Iterator[Layout]:
    for tokens in token_placements(streams):
        yield [tokens] * 5, dict(streams=tokens, **PARAMETERS)


@sharding("_hyper_pre_bwd", reduced=("dx", "dpost", "dcomb"))
def backward(streams: Any, rstd: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for tokens in token_placements(streams):
        if tokens not in rstd.placements:  # backward runs where forward ran
            continue
        results = if_wanted(wanted, tokens, *[summed(tokens)] * 3)
        inputs = dict.fromkeys(("dx", "dpost", "dcomb", "streams", "logits", "rstd"), tokens)
        yield results, inputs | PARAMETERS
