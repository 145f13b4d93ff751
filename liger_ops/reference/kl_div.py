from __future__ import annotations

import torch
from torch import Tensor

from ._divergence import REDUCTIONS, both, reduced
from ._operator import demand, operator


@operator(constants=("target",), choices=REDUCTIONS)
def kl_div(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> Tensor:
    """:func:`torch.nn.functional.kl_div`, in fp32 even for half-precision rows; the target takes no gradient.

    input and target: (..., V) in any floating dtypes, shift_labels: (...) indices -> a scalar, or (..., V) with
    reduction "none", in fp32.

    The input holds log-probabilities, the target probabilities, or log-probabilities with `log_target`. Rows whose
    label is `ignore_index` do not count. "mean" divides by the number of elements that count, and is the default, as in
    PyTorch; "batchmean" divides by ``input.shape[0]``, or by the number of rows that count if there are labels. As in
    liger-kernel, a probability below `eps` has the logarithm of `eps`; PyTorch has no such limit. `eps` is finite and
    not negative.

    Cost: forward moves |input| + |target|, backward 2 |target|. Backward needs the target alone, and overwrites it with
    the gradient.

    >>> kl_div(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.0, 1.0]]), reduction="batchmean")
    tensor(0.6931)
    """
    demand(0 <= eps < float("inf"), "kl_div", "eps", "be finite and not negative", eps)
    x, t = both("kl_div", input, target, shift_labels)
    losses = t.exp() * (t - x) if log_target else t * (torch.where(t == 0, 0, t.clamp(min=eps).log()) - x)
    return reduced(losses, shift_labels, ignore_index, reduction, input.shape[0])
