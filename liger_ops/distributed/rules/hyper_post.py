"""R or S of any dimension but the last two of `streams`, the same for all inputs -> as the inputs; gradients: the
same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...reference._wanted import if_wanted
from .._sharding import Layout, sharding
from .hyper_pre import token_placements

INPUTS = ("y", "streams", "post", "comb")


@sharding("hyper_post")
def forward(streams: Any, **_: Any) -> Iterator[Layout]:
    for tokens in token_placements(streams):
        yield [tokens], dict.fromkeys(INPUTS, tokens)


@sharding("_hyper_post_bwd", reduced=("dout",))
def backward(streams: Any, wanted: int, **_: Any) -> Iterator[Layout]:
    for tokens in token_placements(streams):
        yield if_wanted(wanted, *[tokens] * 4), dict.fromkeys(("dout", *INPUTS), tokens)
