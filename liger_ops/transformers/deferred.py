"""Logits that are not there yet.

In training, a patched head returns a DeferredLogits: it remembers the hidden states and what the model does to the
logits on the way to its loss: casts, shapes, slices of positions, scaling, a softcap. When `cross_entropy` meets it,
the loss comes from the fused operator. Anything else that a model does with it makes the logits and goes on with those,
so a model that is not understood is only slower, never wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from .. import functional as F

if TYPE_CHECKING:
    from torch import nn


class LossCall(NamedTuple):
    """What the head computes instead of logits, inside its own call: sharded weights are whole only there."""

    target: Tensor
    ce_weight: Tensor | None
    reduction: str
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    logits_scale: float

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None, memory_budget: int | None) -> Tensor:
        return F.fused_linear_cross_entropy(
            input, weight, self.target, bias, self.ce_weight, self.reduction, self.ignore_index, self.label_smoothing,
            softcap=self.softcap, logits_scale=self.logits_scale, memory_budget=memory_budget,
        )  # fmt: skip


class LogitsCall:
    """The same for logits after all."""

    @staticmethod
    def run(input: Tensor, weight: Tensor, bias: Tensor | None, memory_budget: int | None) -> Tensor:
        return functional.linear(input, weight, bias)


class DeferredLogits:
    """``scale * x``, or ``cap * tanh(scale * x)``, where x is ``head(hidden)``, or `hidden` itself with no head.

    hidden: (..., n), x: (..., V). Without a head the logits are there, wanted by the caller, and only casts, scaling
    and softcap are put off: the loss takes the logits as they are.
    """

    def __init__(
        self,
        head: nn.Linear | None,
        hidden: Tensor,
        dtype: torch.dtype,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> None:
        self.head = head
        self.hidden = hidden
        self.vocabulary = hidden.shape[-1] if head is None else head.out_features
        self.dtype = dtype
        self.scale = scale
        self.cap = cap
        self.made: Tensor | None = None

    def like(self, hidden: Tensor | None = None, dtype: torch.dtype | None = None) -> DeferredLogits:
        return DeferredLogits(
            self.head, self.hidden if hidden is None else hidden, dtype or self.dtype, self.scale, self.cap
        )

    def logits(self) -> Tensor:
        if self.made is None:
            y = self.hidden if self.head is None else self.head(self.hidden, LogitsCall)
            if self.dtype != y.dtype:
                y = y.to(self.dtype)
            if self.scale != 1.0:
                y = y * self.scale
            if self.cap is not None:
                y = torch.tanh(y) * self.cap
            self.made = y
        return self.made

    # ---- What a model asks of its logits

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled()

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # ---- What it does to them

    def float(self) -> DeferredLogits:
        return self.like(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if isinstance(args[0], torch.dtype):
                return self.like(dtype=args[0])
            if isinstance(args[0], torch.device) and args[0] == self.device:
                return self
        return self.logits().to(*args, **kwargs)

    def contiguous(self) -> DeferredLogits:
        return self

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) > 1 and sizes[-1] == self.vocabulary:
            return self.like(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.logits().reshape(*sizes)

    reshape = view

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        if leaves_last_dimension(entries, self.dim()):
            return self.like(self.hidden[index])
        return self.logits()[index]

    def scaled(self, factor: float) -> DeferredLogits:
        out = self.like()
        if out.cap is None:
            out.scale = out.scale * factor
        else:
            out.cap = out.cap * factor
        return out

    def __mul__(self, other: Any) -> Any:
        return self.scaled(other) if isinstance(other, (int, float)) else self.logits() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self.scaled(1.0 / other) if isinstance(other, (int, float)) and other else self.logits() / other

    def tanh(self) -> Any:
        if self.cap is not None:
            return self.logits().tanh()
        out = self.like()
        out.cap = 1.0
        return out

    # ---- The loss

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        legacy = size_average is not None or reduce is not None
        usual = self.dim() == 2 and target.dim() == 1 and target.dtype in (torch.int64, torch.int32)
        if legacy or not usual or (self.cap is not None and self.cap <= 0):
            return functional.cross_entropy(
                self.logits(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        if self.head is None:
            alone = self.scale == 1.0 if self.cap is None else self.scale * self.cap == 1.0
            logits, cap = (self.hidden, self.cap) if alone else (self.logits(), None)
            return F.cross_entropy(logits, target, weight, reduction, ignore_index, label_smoothing, softcap=cap)
        # cap * tanh(scale * x) = softcap * tanh(logits_scale * x / softcap)
        scale = self.scale if self.cap is None else self.scale * self.cap
        call = LossCall(target, weight, reduction, ignore_index, label_smoothing, self.cap, scale)
        return self.head(self.hidden, call)

    # ---- Anything else

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, DeferredLogits):
            if func is functional.cross_entropy:
                options = {k: v for k, v in kwargs.items() if k != "input"}
                return first.cross_entropy(*args[1:], **options)
            if func is torch.tanh and len(args) == 1 and not kwargs:
                return first.tanh()
        return func(*made(args), **made(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.logits(), name)


def made(tree: Any) -> Any:
    """The same with logits in place of what was deferred."""
    return tree_map(lambda leaf: leaf.logits() if isinstance(leaf, DeferredLogits) else leaf, tree)


def leaves_last_dimension(entries: tuple, dims: int) -> bool:
    """Whether an index takes whole rows of logits."""
    last = entries[-1]
    if isinstance(last, slice) and last == slice(None):
        return True
    if any(entry is Ellipsis for entry in entries):
        return last is Ellipsis
    return sum(map(dimensions_of, entries)) < dims


def dimensions_of(entry: Any) -> int:
    """How many dimensions an entry of an index takes up."""
    if entry is None:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def through_logits(name: str) -> Any:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.logits(), name)(*made(args))

    method.__name__ = name
    return method


# Operators are looked up on the class, where __getattr__ is not asked.
for _name in "add radd sub rsub rtruediv pow neg matmul lt le gt ge len iter".split():
    setattr(DeferredLogits, f"__{_name}__", through_logits(f"__{_name}__"))
