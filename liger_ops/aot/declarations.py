"""Generates from the declarations: C++ functions for liger_ops.h, the schemas that the operator library registers, and a
stub for type checkers."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..reference import Operator, operators, public_names
from ..reference._documentation import documentation
from ..reference._operator import SCHEMA_TYPES, result_count

HEADER, STUB, SCHEMAS = Path("include/liger_ops/operators.h"), Path("_declared.pyi"), Path("schemas.h")

CPP_TYPES = {
    "Tensor": "const at::Tensor&",
    "Tensor?": "const std::optional<at::Tensor>&",
    "float": "double",
    "int": "int64_t",
    "bool": "bool",
    "str": "std::string_view",
    "float?": "std::optional<double>",
    "int?": "std::optional<int64_t>",
    "Tensor[]": "at::TensorList",
    "int[]": "at::IntArrayRef",
    "int[]?": "at::OptionalIntArrayRef",
    "float[]": "at::ArrayRef<double>",
    "float[]?": "std::optional<at::ArrayRef<double>>",
}


def default_value(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{{{', '.join(map(default_value, value))}}}"
    return "std::nullopt" if value is None else json.dumps(value)


def summary(operator: Operator) -> str:
    text = documentation(operator).summary
    return text.replace(":func:`torch.nn.functional.", "`F.").replace(":func:`", "`").replace("``", "`")


def cpp_function(operator: Operator) -> str:
    name, declared = operator.__name__, operator.__signature__.parameters.values()

    # C++ has no defaults before an argument without one, which is a keyword in Python.
    last = max((i for i, p in enumerate(declared) if p.default is p.empty), default=-1)

    def parameter(i: int, p: inspect.Parameter) -> str:
        written = name.endswith("_") and p is next(iter(declared))
        text = f"{'at::Tensor&' if written else CPP_TYPES[SCHEMA_TYPES[operator.types[p.name]]]} {p.name}"
        return text if i <= last else f"{text} = {default_value(p.default)}"

    count = result_count(operator.result)
    result = "at::Tensor" if count == 1 else f"std::tuple<{', '.join(['at::Tensor'] * count)}>"
    return "\n".join([
        f"/// {summary(operator)}",
        f"inline {result} {name}(",
        ",\n".join(f"    {parameter(i, p)}" for i, p in enumerate(declared)) + ") {",
        f'  static const auto op = detail::find<decltype({name})>("liger::{name}");',
        f"  return op.call({', '.join(p.name for p in declared)});",
        "}",
    ])  # fmt: skip


def header() -> str:
    functions = "\n\n".join(map(cpp_function, operators().values()))
    return (
        f"// Generated from liger_ops/reference; included by liger_ops.h.\n\nnamespace liger {{\n\n{functions}\n\n}}\n"
    )


def schemas() -> str:
    lines = [f"inline constexpr const char* {o.__name__} =\n    {json.dumps(o.schema)};" for o in operators().values()]
    aliases = [
        f'    {{"{o.__name__}", {o.__name__}, "{o.alias_of.__name__}"}},' for o in operators().values() if o.alias_of
    ]
    lines += [
        "",
        "/// op: what the alias calls.",
        "struct Alias {",
        "  const char *name, *schema, *op;",
        "};",
        "inline constexpr Alias aliases[] = {",
        *aliases,
        "};",
    ]
    names = "\n".join(lines)
    return f"// Generated from liger_ops/reference.\n#pragma once\n\nnamespace liger::schemas {{\n\n{names}\n\n}}\n"


def stub() -> str:
    """Imports what the declarations write out, and writes out the signatures that they derive from others."""
    lines = ["from collections.abc import Sequence", "from torch import Tensor"]
    for name, value in sorted(public_names().items()):
        if getattr(value, "is_derived", False):
            signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(value.__signature__))
            lines.append(f"def {name}{signature}: ...")
        else:
            lines.append(f"from {value.__module__} import {name} as {name}")
    return "\n".join(["# Generated from liger_ops/reference, for liger_ops/functional.py.", *lines, ""])


def write(package: Path, generated: Path | None = None) -> None:
    """generated: the folder for headers that only the operator library includes."""
    for path, text in ((HEADER, header()), (STUB, stub())):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    if generated is not None:
        from .codegen import write_if_changed  # imported here: it needs Triton

        write_if_changed(generated / SCHEMAS, schemas())
