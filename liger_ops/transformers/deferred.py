"""Logits that are computed only if something other than the loss needs them.

In training, a patched head returns DeferredLogits. They hold the hidden states and record what the model does to the
logits before the loss: casts, reshapes, slices of positions, scaling, a softcap. `cross_entropy` of DeferredLogits
calls the fused operator. Every other operation first materializes the logits and then runs on them, so an unknown
model is slower but never wrong.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from .. import functional as F
from .patched import is_fully_sharded


class LossCall:
    """Arguments of the loss that the head computes in place of logits.

    The head computes it inside its own call, because FSDP gathers sharded weights only for that call. This is neither a
    tuple nor a dataclass, so that hooks that cast the tensors in the head's arguments do not find the class weights.
    """

    loss: Tensor  # set by `run`

    def __init__(
        self, target: Tensor, ce_weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float,
        softcap: float | None, logits_scale: float,
    ) -> None:  # fmt: skip
        self.target = target
        self.ce_weight = ce_weight
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.logits_scale = logits_scale

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, memory_budget: int | None,
        low_rank_input: Tensor | None = None, low_rank_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        loss = F.fused_linear_cross_entropy(
            input, weight, self.target, bias, self.ce_weight, self.reduction, self.ignore_index, self.label_smoothing,
            softcap=self.softcap, logits_scale=self.logits_scale, memory_budget=memory_budget,
            low_rank_input=low_rank_input, low_rank_weight=low_rank_weight,
        )  # fmt: skip
        # Of a head whose classes are split: a DTensor, the same on all devices.
        self.loss = loss.to_local() if hasattr(loss, "to_local") else loss
        return loss

    def run_on_logits(self, logits: Tensor) -> Tensor:
        logits = logits if self.logits_scale == 1.0 else logits * self.logits_scale
        self.loss = F.cross_entropy(
            logits, self.target, self.ce_weight, self.reduction, self.ignore_index, self.label_smoothing,
            softcap=self.softcap,
        )  # fmt: skip
        return self.loss


def call_head(head: nn.Module, input: Tensor, **arguments: Any) -> Tensor:
    """Calls the head with its hooks, but without its patched __call__, which would defer the logits again."""
    return nn.Module.__call__(head, input, **arguments)


REPLICATE = "pass output_layouts=Replicate() to ColwiseParallel for all of them"


def lacks_classes(head: Any, logits: Any) -> bool:
    """Whether they are those of one rank, as ColwiseParallel() returns them by default."""
    return type(logits) is Tensor and logits.dim() > 0 and logits.shape[-1] < head.out_features


def require_all_classes(head: Any, logits: Any) -> None:
    if lacks_classes(head, logits):
        rule = f"the loss needs all logits (got {logits.shape[-1]} of {head.out_features})"
        raise ValueError(f"liger_ops: {rule}; {REPLICATE}")


def on_logits(name: str) -> Callable:
    def method(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.logits(), name)(*materialize(args), **materialize(kwargs))

    method.__name__ = name
    return method


def unless_materialized(method: Callable) -> Callable:
    """The method while the logits are deferred. Later calls use the materialized logits, in case they were modified."""
    after = on_logits(method.__name__)

    @functools.wraps(method)
    def either(self: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        return (after if self.is_materialized() else method)(self, *args, **kwargs)

    return either


class DeferredLogits:
    """``scale * x``, or ``cap * tanh(scale * x)``, where x is ``head(hidden)``, or `hidden` itself without a head.

    hidden: (..., n), x: (..., V). Without a head, `hidden` holds the logits because the caller needs them. Only casts,
    scaling and softcap are deferred, so that the cross_entropy operator can read the logits unchanged.
    """

    def __init__(
        self, head: Any, hidden: Tensor, dtype: torch.dtype, scale: float = 1.0, cap: float | None = None
    ) -> None:
        self.head = head
        self.hidden = hidden
        self.vocabulary = hidden.shape[-1] if head is None else head.out_features
        self.dtype = dtype
        self.scale = scale
        self.cap = cap
        self.requires_grad = torch.is_grad_enabled()
        # The base of a view, and the function that makes the view from the base's logits.
        self.view_from: tuple[DeferredLogits, Callable[[Tensor], Tensor]] | None = None
        self.computed: Tensor | None = None

    def like(self, hidden: Tensor | None = None, dtype: torch.dtype | None = None) -> DeferredLogits:
        return DeferredLogits(
            self.head, self.hidden if hidden is None else hidden, dtype or self.dtype, self.scale, self.cap
        )

    def view_of(self, hidden: Tensor, view: Callable[[Tensor], Tensor]) -> DeferredLogits:
        out = self.like(hidden)
        out.view_from = self, view
        return out

    def is_materialized(self) -> bool:
        return self.computed is not None or (self.view_from is not None and self.view_from[0].is_materialized())

    def logits(self) -> Tensor:
        if self.computed is None:
            # The first use may be under torch.no_grad().
            with torch.set_grad_enabled(self.requires_grad):
                self.computed = self.compute()
        return self.computed

    def compute(self) -> Tensor:
        if self.view_from is not None:
            base, view = self.view_from
            return view(base.logits())
        y = self.hidden
        if self.head is not None:
            y = call_head(self.head, self.hidden)
            require_all_classes(self.head, y)
        if self.dtype != y.dtype:
            y = y.to(self.dtype)
        if self.scale != 1.0:
            y = y * self.scale
        if self.cap is not None:
            y = torch.tanh(y) * self.cap
        return y

    # ---- Properties of tensors

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary)) if self.computed is None else self.computed.shape

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # ---- Operations that stay deferred

    @unless_materialized
    def float(self) -> DeferredLogits:
        return self.to(torch.float32)

    @unless_materialized
    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if isinstance(args[0], torch.dtype):
                return self if args[0] == self.dtype else self.like(dtype=args[0])
            if isinstance(args[0], torch.device) and args[0] == self.device:
                return self
        return self.logits().to(*args, **kwargs)

    @unless_materialized
    def contiguous(self, **options: Any) -> Any:
        if options:
            return self.logits().contiguous(**options)
        return self if self.hidden.is_contiguous() else self.like(self.hidden.contiguous())

    @unless_materialized
    def view(self, *shape: Any, **options: Any) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if options or len(sizes) < 2 or sizes[-1] != self.vocabulary:
            return self.logits().view(*shape, **options)
        hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return self.view_of(hidden, lambda logits: logits.reshape(sizes))

    @unless_materialized
    def reshape(self, *shape: Any, **options: Any) -> Any:
        return self.logits().reshape(**options) if options else self.contiguous().view(*shape)

    @unless_materialized
    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        if not keeps_last_dimension(entries, self.dim()):
            return self.logits()[index]
        if all(isinstance(entry, (int, slice, type(None), type(Ellipsis))) for entry in entries):
            return self.view_of(self.hidden[index], lambda logits: logits[index])
        return self.like(self.hidden[index])

    def scaled(self, factor: builtins.float) -> DeferredLogits:
        out = self.like()
        if out.cap is None:
            out.scale = out.scale * factor
        else:
            out.cap = out.cap * factor
        return out

    @unless_materialized
    def __mul__(self, other: Any) -> Any:
        return self.scaled(other) if isinstance(other, (int, float)) else self.logits() * other

    __rmul__ = __mul__

    @unless_materialized
    def __truediv__(self, other: Any) -> Any:
        return self.scaled(1.0 / other) if isinstance(other, (int, float)) and other else self.logits() / other

    @unless_materialized
    def tanh(self) -> Any:
        if self.cap is not None:
            return self.logits().tanh()
        out = self.like()
        out.cap = 1.0
        return out

    # ---- The loss

    def cross_entropy(
        self, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
        reduce: bool | None = None, reduction: str = "mean", label_smoothing: builtins.float = 0.0,
    ) -> Tensor:  # fmt: skip
        legacy = size_average is not None or reduce is not None
        usual = self.dim() == 2 and target.dim() == 1 and target.dtype in (torch.int64, torch.int32)
        if legacy or not usual or (self.cap is not None and self.cap <= 0):
            return functional.cross_entropy(
                self.logits(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        if self.head is None:
            unscaled = self.scale == 1.0 if self.cap is None else self.scale * self.cap == 1.0
            logits, cap = (self.hidden, self.cap) if unscaled else (self.logits(), None)
            return F.cross_entropy(logits, target, weight, reduction, ignore_index, label_smoothing, softcap=cap)
        # cap * tanh(scale * x) = softcap * tanh(logits_scale * x / softcap)
        scale = self.scale if self.cap is None else self.scale * self.cap
        call = LossCall(target, weight, reduction, ignore_index, label_smoothing, self.cap, scale)
        if hasattr(self.head.weight, "placements") and not is_fully_sharded(self.head):
            # Tensor parallelism's forward or hooks compute and distribute logits.
            call.run(self.hidden, self.head.weight, self.head.bias, self.head.liger_memory_budget)
            return call.loss
        # Hooks of ColwiseParallel drop positional arguments, but no keywords.
        loss = call_head(self.head, self.hidden, liger_call=call)
        # A hook that casts the head's output, such as FSDP's output_dtype, is meant for logits and not for the loss.
        return loss if loss.dtype == call.loss.dtype else call.loss

    # ---- Operations that materialize the logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, DeferredLogits) and not first.is_materialized():
            if func is functional.cross_entropy:
                options = {k: v for k, v in kwargs.items() if k != "input"}
                return first.cross_entropy(*args[1:], **options)
            if func is torch.tanh and len(args) == 1 and not kwargs:
                return first.tanh()
        return func(*materialize(args), **materialize(kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.logits(), name)


def materialize(tree: Any) -> Any:
    """The tree with logits in place of DeferredLogits."""
    return tree_map(lambda leaf: leaf.logits() if isinstance(leaf, DeferredLogits) else leaf, tree)


def keeps_last_dimension(entries: tuple, dims: int) -> bool:
    """Whether an index keeps the last dimension whole."""
    last = entries[-1]
    if isinstance(last, slice) and last == slice(None):
        return True
    if any(entry is Ellipsis for entry in entries):
        return last is Ellipsis
    return sum(map(dimensions_of, entries)) < dims


def dimensions_of(entry: Any) -> int:
    """How many dimensions an entry of an index consumes."""
    if entry is None:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


# Python looks operators up on the class and ignores __getattr__.
BINARY = "add sub mul truediv floordiv mod pow matmul and or xor".split()
OTHERS = "neg pos abs invert eq ne lt le gt ge len iter contains setitem bool int float".split()
for _name in {*OTHERS, *BINARY, *(side + n for side in "ri" for n in BINARY)} - {"imatmul"}:
    if f"__{_name}__" not in vars(DeferredLogits):
        setattr(DeferredLogits, f"__{_name}__", on_logits(f"__{_name}__"))


# ---- Outputs of models


def without_deferred(out: Any) -> Any:
    """A model's output with logits in place of DeferredLogits, and without those that were never materialized."""
    if isinstance(out, tuple) and not hasattr(out, "_fields"):
        out = tuple(item for item in out if not never_materialized(item))
    return resolved(out)


def never_materialized(item: Any) -> bool:
    return isinstance(item, DeferredLogits) and item.head is not None and not item.is_materialized()


def resolved(item: Any) -> Any:
    """The item with logits, or None if they were never materialized, in place of DeferredLogits."""
    if isinstance(item, DeferredLogits):
        return None if never_materialized(item) else item.logits()
    if not any(map(holds_deferred, values_of(item))):
        return item
    if isinstance(item, Mapping):
        values = {key: resolved(value) for key, value in item.items()}
        if dataclasses.is_dataclass(item):
            return type(item)(**values)
        out: Any = copy.copy(item)
        out.update(values)
        return out
    if isinstance(item, (tuple, list)):
        items: Any = map(resolved, item)
        return type(item)(*items) if hasattr(item, "_fields") else type(item)(items)
    return dataclasses.replace(item, **{name: resolved(value) for name, value in fields_of(item).items()})


def holds_deferred(item: Any) -> bool:
    return isinstance(item, DeferredLogits) or any(map(holds_deferred, values_of(item)))


def values_of(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        return item.values()
    return item if isinstance(item, (tuple, list)) else fields_of(item).values()


def fields_of(item: Any) -> dict[str, Any]:
    """The fields that a dataclass takes in its constructor."""
    if not dataclasses.is_dataclass(item) or isinstance(item, type):
        return {}
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item) if field.init}
