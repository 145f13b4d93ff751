from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from ._operator import demand, operator, widened


# The second result of _layer_norm_fwd, mean and rstd, is (2, rows).
@operator(rows=1, forward_out_dims=(0, 1))
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """:func:`torch.nn.functional.layer_norm` over the last dimension.

    x: (..., n), weight and bias: (n,) both in x's dtype or both in fp32 -> (..., n) in x's dtype.

    `eps` is finite and not negative.

    Cost: forward moves 2 |x|, backward 3 |x|. Backward needs x, the weight, and two fp32 numbers per row. The gradient
    of x overwrites the upstream gradient.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    demand(0 <= eps < math.inf, "layer_norm", "eps", "be finite and not negative", eps)
    weight, bias = (None if p is None else widened(p) for p in (weight, bias))
    return functional.layer_norm(widened(x), x.shape[-1:], weight, bias, eps).to(x.dtype)
