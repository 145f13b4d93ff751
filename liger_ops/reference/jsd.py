from __future__ import annotations

import math

import torch
from torch import Tensor

from ._divergence import REDUCTIONS, both, reduced
from ._operator import demand, operator


def _divergence(x: Tensor, t: Tensor) -> Tensor:
    """KL(t || x) of each element."""
    p = t.exp()
    return torch.where(p == 0, 0, p * (t - x))


@operator(constants=("target",), choices=REDUCTIONS)
def jsd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> Tensor:
    """The Jensen-Shannon divergence of log-probabilities, generalised by the target's weight `beta` in the mixture.

    input and target: (..., V) in any floating dtypes, shift_labels: (...) indices -> a scalar, or (..., V) with
    reduction "none", in fp32.

    With p and q the probabilities of target and input, and the mixture ``m = beta * p + (1 - beta) * q``, it is ``beta
    * KL(p || m) + (1 - beta) * KL(q || m)``; for beta 0 it is KL(p || q), for beta 1 KL(q || p). `beta` lies in [0, 1].
    Rows whose label is `ignore_index` do not count. "batchmean" divides by the number of rows that count, as
    liger-kernel does, which makes it the default; "mean" divides by the number of their elements. A probability of zero
    (-inf) contributes zero.

    Cost: forward moves |input| + |target|, backward 2 |input| + |target|. Backward needs input and target, and
    overwrites the target with the gradient.

    >>> jsd(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.0, 1.0]]).log())
    tensor(0.2158)
    """
    demand(0 <= beta <= 1, "jsd", "beta", "be between 0 and 1", beta)
    x, t = both("jsd", input, target, shift_labels)
    if beta == 0:
        losses = _divergence(x, t)
    elif beta == 1:
        losses = _divergence(t, x)
    else:
        # exp of this is 0.
        x, t = x.clamp(min=-1000), t.clamp(min=-1000)
        log_m = torch.logaddexp(t + math.log(beta), x + math.log1p(-beta))
        losses = beta * t.exp() * (t - log_m) + (1 - beta) * x.exp() * (x - log_m)
    return reduced(losses, shift_labels, ignore_index, reduction)
