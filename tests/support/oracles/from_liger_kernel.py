"""Generates docs/from-liger-kernel.md from the list of the package's names and from what liger_ops.compat serves.

python -m tests.support.oracles.from_liger_kernel docs/from-liger-kernel.md
"""

from __future__ import annotations

import dis
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

import liger_ops.compat
from liger_ops import functional as F
from liger_ops.compat import missing, modules
from liger_ops.compat.names import SERVED_VERSION
from liger_ops.reference import operators
from tests.support.oracles.liger_kernel_names import LIST

INTRODUCTION = f"""\
# From liger-kernel

[`liger_ops.compat`](huggingface.md#code-written-for-liger-kernel) serves the names of liger-kernel. This page lists
the public functions and classes of its release {SERVED_VERSION}, with the module below `liger_kernel` that has
them. Parameters are the same; those that control a kernel, such as `in_place`, are ignored.

- [Served by operators](#served-by-operators): computed by kernels, with the operators that they call.
- [Served by formulas](#served-by-formulas): differentiable torch code, in fp32 inside for 16-bit tensors.
- [Served otherwise](#served-otherwise): functions that patch models, and helpers.
- [Importable only](#importable-only): kernels and functions that launch them. They can be imported, as can kernels
  whose names begin with `_`; a call raises a `NotImplementedError` that says what to call instead.
- [Not served](#not-served): an import raises an `ImportError` with the reason and what to use instead. That includes
  names that are not listed: others that begin with `_`, the test helpers in `testing`, and backends for one kind of
  hardware in `ops.backends`, `ops.cute`, `ops.cutedsl` and `ops.cutile`.

Numbers differ by roundings. In 16-bit dtypes, SwiGLU and GEGLU round their result once; liger-kernel also rounds the
activation, as eager torch does. Tests that demand the elements of eager's result can fail, although ours are as close
to fp64.
"""
# Modules whose code is followed.
OURS = re.compile(r"liger_ops\.(compat|losses)\b")


class Name(NamedTuple):
    module: str  # below the package
    name: str
    value: Any  # None if it is not served


def path_of(line: str) -> str:
    return re.sub(r"\.(?:apply|forward|from_\w+)$", "", line.partition("(")[0])


def listed() -> list[str]:
    """The paths of the package's names."""
    lines = [line for line in LIST.read_text().splitlines() if line[0] != "#"]
    return list(dict.fromkeys(map(path_of, lines)))


def found(path: str) -> Name:
    module, _, name = path.rpartition(".")
    members = modules.module_members(module)
    if members is None or name not in members:
        return Name(module, name, None)
    return Name(module, name, getattr(importlib.import_module(f"liger_kernel.{module}"), name))


def target(value: Any) -> Any:
    """What a function or class that `liger_ops.compat.forms` built calls."""
    function = getattr(value, "apply", value)
    return getattr(function, "__globals__", {}).get("operator", value)


def functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions that a value's code consists of."""
    if isinstance(value, type):
        for cls in value.__mro__:
            if OURS.match(cls.__module__):
                yield from (f for v in vars(cls).values() for f in functions_of(getattr(v, "__func__", v)))
    elif isinstance(value, FunctionType):
        yield value


def globals_in(code: CodeType) -> Iterator[list[str]]:
    """Global names, each with the attribute that is read from it, if any."""
    instructions = list(dis.get_instructions(code))
    for this, after in zip(instructions, [*instructions[1:], None]):
        if this.opname == "LOAD_GLOBAL":
            attribute = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield [this.argval, after.argval] if attribute else [this.argval]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from globals_in(constant)


def called_by(function: FunctionType) -> Iterator[Any]:
    """Values that the code of a function reads: globals, attributes of modules, and variables of its closure."""
    for name, *attribute in globals_in(function.__code__):
        value = function.__globals__.get(name)
        yield value
        if attribute and isinstance(value, ModuleType):
            yield getattr(value, attribute[0], None)
    yield from (cell.cell_contents for cell in function.__closure__ or ())


def is_operator(value: Any) -> bool:
    name = getattr(value, "__name__", "")
    return name in operators() and getattr(F, name, None) is value


def reached(value: Any) -> list[Any]:
    """Values that the code of a value reads, itself or through functions of liger_ops."""
    read, todo, seen = [], [value], set()
    while todo:
        current = todo.pop()
        read.append(current)
        if isinstance(current, type):  # product = staticmethod(F.geglu)
            read += filter(is_operator, (getattr(current, name, None) for name in dir(current)))
        for function in () if is_operator(current) else functions_of(current):
            if function not in seen:
                seen.add(function)
                found = list(called_by(function))
                todo += [v for v in found if is_operator(v) or OURS.match(getattr(v, "__module__", None) or "")]
                read += [v for v in found if isinstance(v, ModuleType)]
    return read


def operators_of(value: Any) -> list[str]:
    return sorted({v.__name__ for v in reached(value) if is_operator(v)})


def kind(entry: Name) -> str:
    if entry.value is None:
        return "Not served"
    if isinstance(entry.value, missing.Raw):
        return "Importable only"
    module = getattr(target(entry.value), "__module__", "")
    if ".formulas." in module:
        return "Served by formulas"
    if operators_of(entry.value):
        return "Served by operators"
    if module.endswith((".helpers", ".utils", ".patching")) or module.startswith("liger_ops.transformers"):
        return "Served otherwise"
    return "Served by formulas" if torch in reached(entry.value) else "Served otherwise"


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(*rows: tuple[str, ...]) -> str:
    header, *body = rows
    lines = [header, tuple("---" for _ in header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_name(entries: list[Name]) -> Iterator[tuple[str, list[str], Any]]:
    """Each name, its modules, and its value."""
    merged = defaultdict(list)
    for entry in entries:
        merged[entry.name, id(entry.value)].append(entry)
    for (name, _), same in sorted(merged.items(), key=lambda item: (item[0][0].lower(), item[1][0].module)):
        yield name, [entry.module for entry in same], same[0].value


def operator_links(value: Any) -> str:
    return ", ".join(f"[`{name}`](operators.md#{name})" for name in operators_of(value))


def by_formula(value: Any) -> str:
    return operator_links(value) or "torch"


def otherwise(value: Any) -> str:
    patches = value.__module__.endswith("patching") or value.__module__.startswith("liger_ops.transformers")
    return "[patching](huggingface.md)" if patches else "Python"


def served(entries: list[Name], by: Callable[[Any], str]) -> str:
    """Names that are the same otherwise share a row."""
    rows = defaultdict(list)
    for name, where, value in by_name(entries):
        rows[code(where), by(value)].append(name)
    return table(("names", "in", "by"), *((code(names), *rest) for rest, names in rows.items()))


def importable(entries: list[Name]) -> str:
    merged = defaultdict(list)
    for entry in entries:
        merged[entry.value.instead].append(entry)
    rows = []
    for instead, same in merged.items():
        names, where = (dict.fromkeys(values) for values in zip(*((e.name, e.module) for e in same)))
        rows.append((code(names), code(where), ", ".join(f"`{call}`" for call in instead.split(" or "))))
    return table(("names", "in", "instead"), *rows)


def not_served(entries: list[Name]) -> str:
    by_reason = defaultdict(list)
    for entry in entries:
        by_reason[missing.reason(f"{entry.module}.{entry.name}".removeprefix("."))].append(entry)
    rows = []
    for (why, instead), same in by_reason.items():
        where = defaultdict(list)
        for entry in same:
            where[entry.module].append(entry.name)
        of_names = defaultdict(list)
        for module, names in where.items():
            of_names[tuple(names)].append(module or "liger_kernel")
        listed = "; ".join(f"{code(names)} in {code(paths)}" for names, paths in of_names.items())
        rows.append((listed, why, instead))
    return table(("names", "why", "instead"), *rows)


def page() -> str:
    entries = [found(path) for path in listed()]
    kinds = defaultdict(list)
    for entry in entries:
        kinds[kind(entry)].append(entry)
    sections = {
        "Served by operators": served(kinds["Served by operators"], operator_links),
        "Served by formulas": served(kinds["Served by formulas"], by_formula),
        "Served otherwise": served(kinds["Served otherwise"], otherwise),
        "Importable only": importable(kinds["Importable only"]),
        "Not served": not_served(kinds["Not served"]),
    }
    return INTRODUCTION + "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())


if __name__ == "__main__":
    liger_ops.compat.install(replace=True)
    Path(sys.argv[1]).write_text(page())
