from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._operator import demand, operator, widened


@operator(rows=2)
def delta_gates(
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The decay and the step of the delta rule: ``g = -exp(a_log) * softplus(a + dt_bias)`` and ``beta = sigmoid(b)``.

    a: (..., n) or (..., n, d), b: (..., n) in a's dtype, a_log: (n) in a's dtype or fp32, dt_bias: (n) or (n, d) in
    a_log's dtype -> g with the shape of a in fp32, beta with that of b in its dtype.

    A head has one decay (Gated DeltaNet), or one per channel, if a has one dimension more than b (Kimi Delta Attention).
    With ``lower_bound``, g is ``lower_bound * sigmoid(exp(a_log) * (a + dt_bias))`` instead. beta is multiplied by
    ``beta_scale`` before it is rounded.

    Cost: forward reads a and b and writes g and beta; backward reads both, their upstream gradients and writes theirs.
    Backward needs the inputs.

    >>> delta_gates(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    (tensor([-0.6931]), tensor([0.5000]))
    """
    channels = a.dim() - b.dim()
    fits = channels in (0, 1) and b.dim() > 0 and a.shape[: b.dim()] == b.shape
    demand(fits, "delta_gates", "b", "have the shape of a, or that without its last dimension", tuple(b.shape))
    demand(a_log.shape == b.shape[-1:], "delta_gates", "a_log", f"have shape {(b.shape[-1],)}", tuple(a_log.shape))
    columns = a.shape[b.dim() - 1 :]
    if dt_bias is not None:
        demand(dt_bias.shape == columns, "delta_gates", "dt_bias", f"have shape {tuple(columns)}", tuple(dt_bias.shape))
    u = widened(a) if dt_bias is None else widened(a) + widened(dt_bias)
    rate = widened(a_log).exp()
    rate = rate[:, None] if channels else rate
    g = -rate * functional.softplus(u) if lower_bound is None else lower_bound * torch.sigmoid(rate * u)
    return g, (beta_scale * torch.sigmoid(widened(b))).to(b.dtype)
