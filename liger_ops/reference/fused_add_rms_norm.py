from __future__ import annotations

from torch import Tensor

from ._operator import operator
from .rms_norm import rms_norm


@operator(rows=2, forward_out_dims=(0, 0, 0), choices=rms_norm.choices)
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(s), s)`` with ``s = x + residual``, in one kernel.

    x, residual: (..., n), weight: (n,) in x's dtype or fp32 -> both (..., n) in x's dtype.

    The options are those of :func:`rms_norm`.

    Cost: forward and backward move 4 |x| each; backward moves 3 |x| if s takes no gradient. Backward needs s, a result,
    the weight, and an fp32 number per row. The gradients of x and residual are one tensor, which overwrites the
    upstream gradient.

    >>> y, s = fused_add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), eps=0.0)
    >>> s
    tensor([[3., 4.]])
    >>> y
    tensor([[0.8485, 1.1314]])
    """
    s = x + residual
    return rms_norm.reference(s, weight, eps, offset, casting_mode), s
