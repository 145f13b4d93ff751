from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ._operator import operator


@operator(rows=1)
def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """:func:`torch.nn.functional.embedding`.

    input: (...) indices, weight: (V, n) -> (..., n) in weight's dtype.

    A row of `weight` with the index `padding_idx` has the gradient 0. An index out of range raises an error on CPU, and
    is a device-side assertion on CUDA. Under torch.compile, prefer PyTorch's own operator, as
    :class:`liger_ops.nn.Embedding` does.

    Cost: forward moves 2 |result|, backward |result| + |weight|. Backward needs the indices alone. The gradient is
    dense, |weight|; beyond 3072 indices, backward also sorts them.

    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    try:
        return functional.embedding(input, weight, padding_idx)
    except IndexError:
        # torch's message has neither the index nor the limit.
        wrong = input[(input < 0) | (input >= weight.shape[0])]
        if wrong.numel() == 0:
            raise
        raise IndexError(
            f"embedding: input must lie in [0, {weight.shape[0]}) (got {int(wrong.flatten()[0])})"
        ) from None
