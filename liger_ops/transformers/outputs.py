"""The output of a model whose logits were put off."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .deferred import DeferredLogits


def without_deferred(out: Any) -> Any:
    """A model's output with logits, or without those that were never made."""
    if isinstance(out, tuple) and not hasattr(out, "_fields"):
        out = tuple(item for item in out if not never_made(item))
    return resolved(out)


def never_made(item: Any) -> bool:
    return isinstance(item, DeferredLogits) and item.head is not None and not item.is_made()


def resolved(item: Any) -> Any:
    """The same with what deferred logits have become, or None, in their place."""
    if isinstance(item, DeferredLogits):
        return None if never_made(item) else item.logits()
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
    """What a dataclass is made from."""
    if not dataclasses.is_dataclass(item) or isinstance(item, type):
        return {}
    return {field.name: getattr(item, field.name) for field in dataclasses.fields(item) if field.init}
