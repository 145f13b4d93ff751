from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ._operator import operator


@operator(rows=1)
def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """:func:`torch.nn.functional.embedding`.

    input: (...) indices, weight: (V, n) -> (..., n).

    Under torch.compile, prefer PyTorch's own operator, as :class:`liger_ops.nn.Embedding` does.

    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    return functional.embedding(input, weight, padding_idx)
