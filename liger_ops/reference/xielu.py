from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import demand, operator, widened


@operator(rows=1)
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6) -> Tensor:
    """The activation of Apertus, an integral of ELU with two trained slopes. With ``p = softplus(alpha_p)`` and ``s =
    softplus(alpha_n)``, it is ``p * x ** 2 + beta * x`` for x > 0, else ``(s + beta) * (expm1(min(x, eps)) - x) + beta * x``.

    x: (..., n), alpha_p and alpha_n: (1,) in x's dtype or fp32 -> (..., n) in x's dtype.

    Arithmetic is fp32 with one rounding. For x <= 0 it is ``s * (expm1(min(x, eps)) - x) + beta * expm1(min(x, eps))``, the
    same without loss of digits.

    Cost: forward moves 2 |x|, backward 3 |x|. Backward needs x. The gradient of x overwrites the upstream gradient.

    >>> xielu(torch.tensor([-1.0, 2.0]), torch.zeros(1), torch.zeros(1))
    tensor([-0.0611,  3.7726])
    """
    for name, alpha in (("alpha_p", alpha_p), ("alpha_n", alpha_n)):
        demand(alpha.numel() == 1, "xielu", name, "have one element", tuple(alpha.shape))
    p, s = (functional.softplus(widened(alpha)).reshape(()) for alpha in (alpha_p, alpha_n))
    v = widened(x)
    rise = torch.expm1(v.clamp(max=eps))
    return torch.where(v > 0, (p * v + beta) * v, s * (rise - v) + beta * rise).to(x.dtype)
