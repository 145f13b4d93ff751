"""fp8_linear takes plain tensors: FSDP2 gathers weights before it is called. Tensor parallelism is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._sharding import on_dtensors


def refuse(x: Any, weight: Any, bias: Any, **_: Any) -> Tensor:
    name = next(name for name, t in dict(x=x, weight=weight, bias=bias).items() if isinstance(t, DTensor))
    raise ValueError(
        f"fp8_linear: {name} must be a plain tensor (got a DTensor); tensor parallelism is not supported, so leave the "
        "layers that it splits to torch's linear"
    )


for op in ("fp8_linear", "_fp8_linear_fwd"):
    on_dtensors(op)(refuse)
