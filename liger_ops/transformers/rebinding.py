"""Copies of functions with other globals."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any


def inner_function(function: Any) -> Any:
    """The function inside its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def is_wrapper_of(wrapper: Any, function: Any) -> bool:
    """Whether the wrapper, a decorated function or a bound method, ends in a call of the function."""
    return getattr(inner_function(wrapper), "__func__", inner_function(wrapper)) is function


def rebound(function: Any, replaced: dict[str, Callable], code: types.CodeType | None = None) -> Any:
    """A copy of a function and its decorators, with `replaced` among its globals and, if given, `code` as its code.

    The copy's globals hold only the names that its code uses. They must not hold the module's __name__, because
    torch.compile would then read the globals from the module.
    """
    cells = function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        inner, code = rebound(wrapped, replaced, code), function.__code__
        cells = tuple(types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells or ())
        scope = function.__globals__
    else:
        known, code = function.__globals__, code or function.__code__
        scope = {n: known[n] for n in names_in(code) if n in known} | replaced | {"__builtins__": builtins}
    bound: Any = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells)
    bound.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(bound, function)
    if wrapped is None:
        del bound.__wrapped__
    else:
        bound.__wrapped__ = inner
    return bound


def rebinding_key(function: Any) -> tuple:
    """A cache key: the function and the identity of the globals that it uses, which may change between patches."""
    inner = inner_function(function)
    known = inner.__globals__
    return function, *(id(known[name]) for name in sorted(names_in(inner.__code__)) if name in known)


def names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names
