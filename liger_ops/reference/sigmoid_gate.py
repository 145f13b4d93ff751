from __future__ import annotations

import torch
from torch import Tensor

from ._operator import demand, operator, widened


@operator(rows=3)
def sigmoid_gate(x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    """``x * sigmoid(gate)``, plus the residual if there is one: the output gate of attention, and that of a shared expert.

    x: (..., n), gate: (..., n) or (..., 1), residual: (..., n) -> (..., n), all in one dtype.

    Arithmetic is fp32 with one rounding.

    Cost: forward moves 3 |x|, backward 5 |x|; 2 |x| and 3 |x| with one number per row, and 1 |x| more in forward with a
    residual. Backward needs x and the gate. The gradient of x overwrites the upstream gradient, unless that is the gradient
    of the residual.

    >>> sigmoid_gate(torch.tensor([1.0, 2.0]), torch.zeros(1), torch.ones(2))
    tensor([1.5000, 2.0000])
    """
    shape = tuple(x.shape)
    fits = tuple(gate.shape) in (shape, (*shape[:-1], 1))
    demand(fits, "sigmoid_gate", "gate", f"have shape {shape}, or 1 as its last dimension", tuple(gate.shape))
    out = widened(x) * torch.sigmoid(widened(gate))
    return (out if residual is None else widened(residual) + out).to(x.dtype)
