from __future__ import annotations

from torch import Tensor

from ._divergence import REDUCTIONS, both, reduced
from ._operator import operator


@operator(constants=("target",), choices=REDUCTIONS)
def tvd(
    input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> Tensor:
    """The total variation distance of probabilities: half the sum of their absolute differences.

    input and target: (..., V), shift_labels: (...) indices. Rows whose label is `ignore_index` do not count. "batchmean" divides
    by the number of rows that count, "mean" by the number of their elements. The target takes no gradient; where both are
    equal, that of the input is 0.

    >>> tvd(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 1.0]]))
    tensor(0.5000)
    """
    x, t = both("tvd", input, target, shift_labels)
    return reduced(0.5 * (x - t).abs(), shift_labels, ignore_index, reduction)
