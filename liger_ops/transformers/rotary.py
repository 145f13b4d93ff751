"""Rotary position embedding: modules with a method that calls a rotary function."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from . import probe, rewrite
from .patched import Switches, give_subclass, require_switch
from .probe import NotUnderstood
from .rebinding import inner_function, rebinding_key, rebound


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            return
        for name, value in vars(base).items():
            if name not in seen and isinstance(value, types.FunctionType) and not name.startswith("__"):
                seen.add(name)
                yield name, value


def is_rotary(name: str, value: Any) -> bool:
    return callable(value) and name.startswith("apply_rot") and inspect.isfunction(inner_function(value))


def rotary_methods(cls: type) -> dict[str, dict[str, Any]]:
    """The methods of a class that call rotary functions, with these functions by name."""
    found = {}
    for method, function in methods_of(cls):
        inner = inner_function(function)
        code, scope = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
        used = {n: scope[n] for n in code.co_names if n in scope and is_rotary(n, scope[n])} if code else {}
        if used:
            found[method] = used
    return found


@functools.lru_cache(None)
def rotary_replacement(function: Any) -> Callable | str:
    try:
        return probe.rotary_function(probe.identify_rotary(function), function)
    except NotUnderstood as reason:
        return str(reason)


def patch_rotary(module: nn.Module, switches: Switches) -> str:
    require_switch(switches, "rope")
    methods = rotary_methods(type(module))
    choices = {f: rotary_replacement(f) for used in methods.values() for f in used.values()}
    replacements = {f: choice for f, choice in choices.items() if not isinstance(choice, str)}
    if not replacements:
        raise NotUnderstood("; ".join(dict.fromkeys(map(str, choices.values()))))

    def members(cls: type) -> dict[str, Any]:
        bound = {}
        for method, used in methods.items():
            replaced = {n: replacements[f] for n, f in used.items() if f in replacements}
            function = getattr(cls, method)
            code = rewrite.with_shared_projections(inner_function(function), linears)
            bound[method] = rebound(function, replaced | rewrite.HELPERS, code)
        return bound

    linears = rewrite.projections_of(module)
    key = linears, tuple(rebinding_key(getattr(type(module), method)) for method in methods)
    give_subclass(module, "rope", "rope", key, members)
    return "rope"
