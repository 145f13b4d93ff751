from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import operator, widened


@operator(rows=2, choices={"approximate": ("tanh", "none")})
def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``.

    gate, up: (..., n) -> (..., n).

    `approximate` is that of :func:`torch.nn.functional.gelu`. "tanh" is the default, as in Gemma.

    Cost: forward moves 3 |gate|, backward 5 |gate|. Backward needs gate and up, and overwrites them with their
    gradients.

    >>> geglu(torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.6824])
    """
    product = functional.gelu(widened(gate), approximate=approximate) * widened(up)
    return product.to(torch.promote_types(gate.dtype, up.dtype))


@operator(rows=1, choices=geglu.choices)
def geglu_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """:func:`geglu` of the two halves of a fused projection.

    gate_up: (..., 2 n) -> (..., n).

    Cost: forward moves 1.5 |gate_up|, backward 2.5 |gate_up|. Backward needs gate_up, and overwrites it with its
    gradient.

    >>> geglu_packed(torch.tensor([1.0, 2.0]))
    tensor([1.6824])
    """
    gate, up = gate_up.chunk(2, -1)
    return geglu.reference(gate, up, approximate)


@operator(rows=2, choices=geglu.choices)
def geglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "tanh"
) -> Tensor:
    """``F.linear(geglu(gate, up, approximate), weight, bias)``. Backward recomputes the geglu instead of saving it.

    gate, up: (..., n), weight: (m, n), bias: (m,) -> (..., m).

    Cost: one GEMM in forward, two in backward, one for each of weight and gate and up. Besides, forward moves 3 |gate|,
    and backward 6 |gate|, or 5 if `weight` takes no gradient. Backward needs gate, up and weight, and overwrites gate
    and up with their gradients.

    >>> geglu_linear(torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([[3.0]]))
    tensor([5.0472])
    """
    return functional.linear(geglu.reference(gate, up, approximate), weight, bias)
