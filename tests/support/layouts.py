"""Layouts in memory that operators must take: of a tensor of any rank, in one of its dimensions. What lies between the
elements is NaN, or the largest number of an integer type."""

from collections.abc import Callable

import torch
from torch import Tensor


def between(x: Tensor) -> float | int:
    if x.dtype == torch.bool:
        return True
    return torch.iinfo(x.dtype).max if not (x.is_floating_point() or x.is_complex()) else float("nan")


def within(x: Tensor, shape: list[int], view: Callable[[Tensor], Tensor]) -> Tensor:
    """x in a view of a larger tensor of this shape."""
    found = view(torch.full(shape, between(x), dtype=x.dtype, device=x.device))
    return found.copy_(x.detach())


def twice(x: Tensor, dim: int) -> list[int]:
    return [2 * n if i == dim % x.dim() else n for i, n in enumerate(x.shape)]


def sliced(x: Tensor, dim: int) -> Tensor:
    return within(x, twice(x, dim), lambda t: t.narrow(dim, 0, x.shape[dim]))


def strided(x: Tensor, dim: int) -> Tensor:
    return within(x, twice(x, dim), lambda t: t[(slice(None),) * (dim % x.dim()) + (slice(None, None, 2),)])


def transposed(x: Tensor, dim: int) -> Tensor:
    other = 0 if dim % x.dim() else -1
    return x.detach().transpose(dim, other).contiguous().transpose(dim, other)


def expanded(x: Tensor, dim: int) -> Tensor:
    """The first element for all."""
    return x.detach().narrow(dim, 0, min(1, x.shape[dim])).expand_as(x)


def offset(x: Tensor, elements: int) -> Tensor:
    """From an aligned address, as a parameter within a flat buffer."""
    return within(x, [elements + x.numel() + 1], lambda t: t[elements:-1].view(x.shape))


def odd_where_one(x: Tensor) -> Tensor:
    """The stride of a dimension of size 1 says nothing."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    return x.as_strided(x.shape, [3 if n == 1 else stride for n, stride in zip(x.shape, x.stride())])


SIZE_ONE = "odd strides of size 1"
# Of a tensor with at least one dimension.
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sliced": sliced,
    "strided": strided,
    "transposed": transposed,
    "expanded": expanded,
    "one number": lambda x, dim: x.detach().reshape(-1)[:1].expand(x.numel() or 0).as_strided(x.shape, [0] * x.dim()),
    "offset by 1": lambda x, dim: offset(x, 1),
    "offset by 4": lambda x, dim: offset(x, 4),
    SIZE_ONE: lambda x, dim: odd_where_one(x),
}
# Those that do not depend on the dimension.
WHOLE = ("one number", "offset by 1", "offset by 4", SIZE_ONE)


def layouts_of(x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """The different ones of its first and its last dimension, and of the second of four: the heads."""
    dims = {0: "first", x.dim() - 1: "last"} if x.dim() else {}
    dims |= {1: "second"} if x.dim() > 3 else {}
    found = {}
    for layout, change in LAYOUTS.items():
        for dim, which in list(dims.items())[: 1 if layout in WHOLE else None]:
            name = layout if layout in WHOLE else f"{layout} in the {which} dimension"
            found[name] = lambda t, change=change, dim=dim: change(t, dim)
    return found
