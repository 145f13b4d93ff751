"""What the original forward of a replaced module reads from it: numbers, functions and children, which may change after the
patch. An operator replaces the forward only as long as they are what they were.

The names come from the bytecode of the forward and of the methods that it calls on its module. What the operator itself reads
in every call need not be compared: `follows` names it.
"""

from __future__ import annotations

import dis
import enum
import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..linear.layers import has_hooks

MISSING = object()
LITERALS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, enum.Enum)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
# Attributes of every module, and of tensors.
OF_MODULES = frozenset(vars(nn.Module())) | frozenset(dir(nn.Module))
OF_TENSORS = frozenset(dir(Tensor))


class Reads(NamedTuple):
    """Of a module, or of another object that it holds, as a config."""

    values: tuple[tuple[str, Any], ...] = ()  # literals and functions
    others: tuple[tuple[str, Any], ...] = ()  # what `comparable` makes of them
    methods: tuple[tuple[str, Any], ...] = ()
    children: tuple[tuple[str, type, Any], ...] = ()  # with what their own forward reads
    objects: tuple[tuple[str, Any], ...] = ()


NOTHING = Reads()


# ---- Names


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def passes_on(code: types.CodeType) -> bool:
    """Whether the function gives its module to other code, or may do so."""
    name = code.co_varnames[0] if code.co_argcount else ""
    steps = [*dis.get_instructions(code)]
    for step, following in zip(steps, steps[1:]):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "STORE_FAST_LOAD_FAST")) and name in loaded:
            attribute = following.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER", "STORE_ATTR"))
            if loaded[-1] != name or not attribute:
                return True
    return False


def functions_of(cls: type, name: str) -> Iterator[types.FunctionType]:
    """The methods and properties of this name in the class and its bases, and what decorators made of them."""
    for base in cls.__mro__:
        found = vars(base).get(name) if base not in (nn.Module, object) else None
        found = getattr(found, "fget", getattr(found, "__func__", found))
        while isinstance(found, types.FunctionType):
            yield found
            found = getattr(found, "__wrapped__", None)


@functools.lru_cache(None)
def names_read(cls: type, method: str) -> tuple[frozenset[str], bool]:
    """Names that the method may read from its module, besides others, and whether other code may read any name."""
    names: set[str] = set()
    waiting, seen, passed = [method], {method}, False
    while waiting:
        for function in functions_of(cls, waiting.pop()):
            for code in codes_in(function.__code__):
                names.update(code.co_names)
            passed = passed or passes_on(function.__code__)
        waiting += [name for name in names - seen if next(functions_of(cls, name), None)]
        seen.update(waiting)
    return frozenset(names), passed


# ---- Values


def is_value(value: Any) -> bool:
    return isinstance(value, LITERALS + FUNCTIONS)


def comparable(value: Any) -> Any:
    """A value that is equal for copies of the same module."""
    if isinstance(value, functools.partial):
        return value.func, comparable(value.args), tuple(sorted(value.keywords.items()))
    if isinstance(value, types.MethodType):
        return value.__func__
    if isinstance(value, (list, tuple)):
        return tuple(map(comparable, value))
    return value


def is_comparable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(is_value(item) or is_comparable(item) for item in value)
    return isinstance(value, (functools.partial, types.MethodType))


def reads_of(owner: Any, method: str, follows: Collection[str] = ()) -> Reads:
    """What the method of a module reads, but for what the operator follows: names, or names of names as "norm.eps"."""
    cls: Any = getattr(type(owner), "liger_original", type(owner))
    names, passed = names_read(cls, method)
    own = vars(owner).keys() | owner._modules.keys() if passed or not names else set()
    # Names with an underscore, unless they are in the code, are the bookkeeping of others.
    own = {name for name in own if not name.startswith(("_", "liger_"))}
    return reads_by_name(owner, names, own, {method, *follows})


def reads_by_name(owner: Any, in_code: Collection[str], own: Collection[str], follows: Collection[str]) -> Reads:
    """in_code: names in the code, which may belong to anything. own: further names, of the owner alone."""
    values, others, methods, children, objects = [], [], [], [], []
    for name in sorted({*in_code, *own} - {*follows} - OF_MODULES):
        value = MISSING if isinstance(getattr(type(owner), name, None), property) else getattr(owner, name, MISSING)
        inner = [path.removeprefix(f"{name}.") for path in follows if path.startswith(f"{name}.")]
        if value is MISSING or isinstance(value, Tensor):
            continue
        if next(functions_of(type(owner), name), None):
            methods.append((name, getattr(value, "__func__", value)))
        elif is_value(value):
            values.append((name, value))
        elif is_comparable(value):
            others.append((name, comparable(value)))
        elif isinstance(value, nn.Module):
            cls = getattr(type(value), "liger_original", type(value))
            children.append((name, cls, reads_of(value, "forward", inner)))
        elif hasattr(value, "__dict__"):
            found = reads_by_name(value, ({*in_code} & vars(value).keys()) - OF_TENSORS, (), inner)
            if found != NOTHING:
                objects.append((name, found))
    return Reads(*map(tuple, (values, others, methods, children, objects)))  # type: ignore[arg-type]


# ---- In every call


def unchanged(owner: Any, reads: Reads) -> bool:
    """Whether the object, and its children, have these values, and nothing observes the children."""
    for name, value in reads.values:
        found = getattr(owner, name, MISSING)
        if found is not value and (type(found) is not type(value) or found != value):
            return False
    for name, cls, inner in reads.children:
        child = owner._modules.get(name)
        if child is None or getattr(type(child), "liger_original", type(child)) is not cls:
            return False
        if has_hooks(child) or "forward" in child.__dict__ or not unchanged(child, inner):
            return False
    for name, value in reads.others:
        if comparable(getattr(owner, name, MISSING)) != value:
            return False
    for name, function in reads.methods:
        found = getattr(owner, name, MISSING)
        if getattr(found, "__func__", found) is not function:
            return False
    for name, inner in reads.objects:
        if not unchanged(getattr(owner, name, None), inner):
            return False
    return True


def while_unchanged(ours: Callable, original: Callable, reads: Reads) -> Callable:
    """The forward `ours`, or the original once it would read something else."""
    if reads == NOTHING:
        return ours

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if unchanged(self, reads) else original)(self, *args, **kwargs)

    return forward
