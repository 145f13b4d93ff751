"""Outputs of models that hold deferred logits."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from .deferred import DeferredLogits


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
