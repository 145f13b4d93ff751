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

    input and target: (..., V) in any floating dtypes, shift_labels: (...) indices -> a scalar, or (..., V) with
    reduction "none", in fp32.

    Rows whose label is `ignore_index` do not count. "batchmean" divides by the number of rows that count, and is the
    default, as in liger-kernel; "mean" divides by the number of their elements. Where input and target are equal, the
    gradient is 0.

    Cost: forward moves |input| + |target|, backward 2 |input| + |target|. Backward needs input and target, and
    overwrites the target with the gradient.

    >>> tvd(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 1.0]]))
    tensor(0.5000)
    """
    x, t = both("tvd", input, target, shift_labels)
    return reduced(0.5 * (x - t).abs(), shift_labels, ignore_index, reduction)
