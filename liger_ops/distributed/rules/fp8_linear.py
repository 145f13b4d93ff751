"""DTensors are refused: FSDP2 gathers weights before the call, and layers that tensor parallelism splits stay
torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._sharding import on_dtensors


def refuse(op: str, **tensors: Any) -> Tensor:
    name = next(name for name, t in tensors.items() if isinstance(t, DTensor))
    raise ValueError(
        f"{op}: {name} must be a plain tensor (got a DTensor); tensor parallelism is not supported, so leave the "
        "layers that it splits to torch's linear"
    )


@on_dtensors("fp8_linear")
def fp8_linear(x: Any, weight: Any, bias: Any, **_: Any) -> Tensor:
    return refuse("fp8_linear", x=x, weight=weight, bias=bias)


@on_dtensors("fp8_projections")
def fp8_projections(x: Any, weights: Sequence[Any], biases: Sequence[Any], *_: Any, **__: Any) -> Tensor:
    numbered = {
        f"{name}[{i}]": t for name, ts in dict(weights=weights, biases=biases).items() for i, t in enumerate(ts)
    }
    return refuse("fp8_projections", x=x, **numbered)


@on_dtensors("_fp8_projections_fwd")
def forward_with_graph(x: Any, weights: Sequence[Any], biases: Sequence[Any], *_: Any, **__: Any) -> Tensor:
    """Both operators come here if a gradient is needed. fp8_linear has one weight."""
    if len(weights) == 1:
        return fp8_linear(x, weights[0], next(iter(biases), None))
    return fp8_projections(x, weights, biases)
