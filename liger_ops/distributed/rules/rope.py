"""`q`, `k`: R, S(0) or S(1); `cos`, `sin`: R, or sharded with the batch -> as `q` and `k`; gradients: the same.

`q`, `k`: S(2); `cos`, `sin`: S of the sequence -> as `q` and `k`; gradients: the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from .._sharding import Layout, R, on_dtensors, sharding


@sharding("rope")
def forward(q: Any, cos: Any, **_: Any) -> Iterator[Layout]:
    """q: (B, Hq, S, D), k: (B, Hk, S, D), cos and sin: (S, R), (1 or B, S, R), or (3, 1 or B, S, R)."""
    heads, batch, positions = Shard(1), Shard(0), Shard(2)
    angles: Placement = R
    yield [R, R], dict(q=R, k=R, cos=R, sin=R)
    yield [heads, heads], dict(q=heads, k=heads, cos=R, sin=R)
    yield [heads, R], dict(q=heads, k=R, cos=R, sin=R)
    angles = Shard(cos.ndim - 2)
    yield [positions, positions], dict(q=positions, k=positions, cos=angles, sin=angles)
    angles = Shard(cos.ndim - 3) if cos.ndim > 2 and cos.shape[-3] > 1 else R
    yield [batch, batch], dict(q=batch, k=batch, cos=angles, sin=angles)


def dense_strides(shape: Any, like: Any) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions are in the order of the strides `like`."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[d], step = step, step * shape[d]
    return tuple(strides)


@on_dtensors("_rope_bwd")
def backward(
    dq: DTensor,
    dk: DTensor,
    cos: Any,
    sin: Any,
    interleaved: bool,
    mrope_section: Any,
    trailing: bool,
    halves_out: bool,
    q_strides: Any,
    k_strides: Any,
) -> tuple[DTensor, DTensor]:
    """Strides are of the whole tensors; each device lays out its part alone."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in (dq, dk, cos, sin)]
    strides = [dense_strides(part.shape, of) for part, of in zip(parts, (q_strides, k_strides))]
    turned = torch.ops.liger._rope_bwd(*parts, interleaved, mrope_section, trailing, halves_out, *strides)

    def whole(part: Tensor, like: DTensor, strides: Any) -> DTensor:
        stride = dense_strides(like.shape, strides)
        placements = like.placements
        return DTensor.from_local(part, like.device_mesh, placements, run_check=False, shape=like.shape, stride=stride)

    return whole(turned[0], dq, q_strides), whole(turned[1], dk, k_strides)
