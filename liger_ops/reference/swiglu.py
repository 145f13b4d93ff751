from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import operator, widened


@operator(rows=2)
def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """``silu(gate) * up``.

    gate, up: (..., n) -> (..., n).

    With `limit`, which is positive, gate is at most limit and up is clamped to [-limit, limit], as in DeepSeek-V4.
    Gradients pass at the limit, and are 0 beyond it.

    Cost: forward moves 3 |gate|, backward 5 |gate|. Backward needs gate and up, and overwrites them with their
    gradients.

    >>> swiglu(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.4621])
    """
    g, u = widened(gate), widened(up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (functional.silu(g) * u).to(torch.promote_types(gate.dtype, up.dtype))


@operator(rows=1)
def swiglu_packed(gate_up: Tensor, limit: float | None = None) -> Tensor:
    """:func:`swiglu` of the two halves of a fused projection.

    gate_up: (..., 2 n) -> (..., n).

    Cost: forward moves 1.5 |gate_up|, backward 2.5 |gate_up|. Backward needs gate_up, and overwrites it with its
    gradient.

    >>> swiglu_packed(torch.tensor([1.0, 2.0]))
    tensor([1.4621])
    """
    gate, up = gate_up.chunk(2, -1)
    return swiglu.reference(gate, up, limit)


@operator(rows=2)
def swiglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, limit: float | None = None
) -> Tensor:
    """``F.linear(swiglu(gate, up, limit), weight, bias)``. Backward recomputes the swiglu instead of saving it.

    gate, up: (..., n), weight: (m, n), bias: (m,) -> (..., m).

    Cost: one GEMM in forward, two in backward, one for each of weight and gate and up. Besides, forward moves 3 |gate|,
    and backward 6 |gate|, or 5 if `weight` takes no gradient. Backward needs gate, up and weight, and overwrites gate
    and up with their gradients.

    >>> swiglu_linear(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([[3.0]]))
    tensor([4.3864])
    """
    return functional.linear(swiglu.reference(gate, up, limit), weight, bias)
