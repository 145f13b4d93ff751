"""Generates a C++ header from each variant table: typed argument structs, config tables, flags and limits."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

from ..kernels import Kernel, modules
from ..kernels.table import INTEGER_ALIGNMENT, POINTER_ALIGNMENT

CSRC = Path(__file__).parents[2] / "csrc"
# File name endings of an operator's C++ sources.
SOURCES = (".cpp", "_cpu.cpp", "_cuda.cpp", "_plan.cpp")

CPP_TYPES = {"i32": "int32_t", "i64": "int64_t", "fp32": "float", "map": "runtime::TensorMap"}
CPP_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def member(kernel: Kernel, name: str) -> str:
    """Where the host keeps an argument: two levels of strides, <tensor>_outer and <tensor>_inner, are one member."""
    tensor, _, level = name.rpartition("_")
    levels = [kernel.args.get(f"{tensor}_{each}") for each in ("outer", "inner")]
    return f"{tensor}_strides.{level}" if level in ("outer", "inner") and levels == ["i64"] * 2 else name


def args_struct(kernel: Kernel) -> str:
    fields, checks = [], []
    for name, kind, offset, _ in kernel.layout:
        field, *of_strides = member(kernel, name).split(".")
        checks.append(f"  static_assert(offsetof(Args, {'.'.join([field, *of_strides])}) == {offset});")
        if of_strides == ["inner"]:
            continue
        kinds = "runtime::RowStrides" if of_strides else "const void*" if kind[0] == "*" else CPP_TYPES[kind]
        fields.append(f"    {kinds} {field}{' = nullptr' if name.endswith('_scratch') else ''};")
    return "\n".join(["  struct Args {", *fields, "  };", *checks])


def alignment(kernel: Kernel) -> str:
    """Whether arguments are as the aligned configs assume."""
    of = {True: f"uintptr_t(a.{{}}) % {POINTER_ALIGNMENT} == 0", False: f"a.{{}} % {INTEGER_ALIGNMENT} == 0"}
    tests = [of[kernel.args[name][0] == "*"].format(member(kernel, name)) for name in kernel.aligned]
    text = " &&\n        ".join(tests) or "true"
    return f"  static bool is_aligned([[maybe_unused]] const Args& a) {{\n    return {text};\n  }}"


def config_table(kernel: Kernel) -> str:
    names = list(kernel.configs[0].constexprs)
    rows = []
    for c in kernel.configs:
        values = [-1 if bound is None else bound for bound in (c.max_n, c.max_rows)]
        values += [hex(kernel.points(c)), str(c.aligned).lower(), c.num_warps, c.programs_per_sm]
        rows.append("      {" + ", ".join(map(str, values + [c.constexprs[n] for n in names])) + "},")
    fields = "".join(f" int {n};" for n in names)
    facts = "int64_t max_n, max_rows; uint64_t points; bool aligned;"
    struct = f"  struct Config {{ {facts} int num_warps; int programs_per_sm;{fields} }};"
    size = f"  static_assert(sizeof(Config) == {len(kernel.config_bytes(kernel.configs[0]))});"
    return "\n".join([struct, size, "  static constexpr Config configs[] = {", *rows, "  };"])


def choosing(values: list[dict]) -> list[str]:
    """What the host names to choose one of an axis' values: dtypes, with constants where several values share them."""
    dtypes = [k for k, v in values[0].items() if isinstance(v, str)]
    distinct = {tuple(value[k] for k in dtypes) for value in values}
    return dtypes if not dtypes or len(distinct) == len(values) else list(values[0])


def cpp_choice(value: str | int) -> str:
    return f"runtime::DType::{CPP_DTYPES[value]}" if isinstance(value, str) else str(value)


def axis_functions(kernel: Kernel) -> str:
    out = []
    for axis, values in kernel.axes.items():
        choices = choosing(values)
        out.append(f"  static constexpr int {axis}_count = {len(values)};")
        if choices:
            kinds = ("runtime::DType" if isinstance(values[0][k], str) else "int" for k in choices)
            out.append(f"  static constexpr int {axis}({', '.join(map(' '.join, zip(kinds, choices)))}) {{")
            for i, value in enumerate(values):
                test = " && ".join(f"{k} == {cpp_choice(value[k])}" for k in choices)
                out.append(f"    if ({test}) return {i};")
            out.append("    return -1;\n  }")
    sizes = ", ".join(str(len(v)) for v in kernel.axes.values())
    out.append(f"  static constexpr int axes[] = {{{sizes}}};")
    return "\n".join(out)


def constants(kernels: list[Kernel]) -> dict[str, int]:
    """Integer constants that the host needs (flags, limits), from the kernels' file and its family's private files."""
    module = sys.modules[kernels[0].function.fn.__module__]
    path = Path(str(module.__file__))
    found: dict[str, int] = {}
    for file in (path, *sorted(path.parent.glob("_[!_]*.py"))):
        defining = import_module(f"{module.__package__}.{file.stem}")
        targets = [t for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign) for t in node.targets]
        names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        values = {name: getattr(getattr(defining, name, None), "value", None) for name in names}
        for name, value in values.items():
            if isinstance(value, int) and found.setdefault(name, value) != value:
                raise ValueError(f"{path}: {name} is {found[name]}, and {value} in {file.name}; rename one of them")
    return found


def header(stem: str, kernels: list[Kernel]) -> str:
    includes = ['"runtime/kernel.h"', '"runtime/tensor_map.h"', "<cstddef>"]
    out = ["#pragma once", *(f"#include {i}" for i in includes), "", "namespace liger::kernels {"]
    out += [f"\nnamespace constants::{stem} {{"]
    # C++ has no literal for the smallest int32.
    out += [f"constexpr int32_t {k} = {v if v > -(2**31) else 'INT32_MIN'};" for k, v in constants(kernels).items()]
    out += [f"}}  // namespace constants::{stem}"]
    for kernel in kernels:
        out += [f"\nstruct {kernel.name} {{", args_struct(kernel), alignment(kernel), config_table(kernel)]
        out += [axis_functions(kernel)]
        out += ["  static LIGER_RUNTIME_API runtime::Kernel kernel;", "};"]
    return "\n".join([*out, "\n}  // namespace liger::kernels", ""])


def kernels_named(path: Path, seen: set[Path]) -> set[str]:
    """Kernels that a C++ file names, itself or through its includes. A header counts with the sources next to it."""
    if path in seen or not path.exists():
        return set()
    seen.add(path)
    text = path.read_text()
    found = set(re.findall(r"\bkernels::([a-z0-9_]+)\b", text))
    for header in re.findall(r'#include "((?:core|gemm|ops)/[\w/]+)\.h"', text):
        for ending in (".h", *SOURCES):
            found |= kernels_named(CSRC / (header + ending), seen)
    return found


def operators_of() -> dict[str, list[str]]:
    """Kernel -> stems of the operators whose C++ sources launch it."""
    out: dict[str, list[str]] = {}
    for path in sorted((CSRC / "ops").rglob("*.cpp")):
        if path.name.endswith(tuple(ending for ending in SOURCES if ending[0] == "_")):
            continue
        seen: set[Path] = set()
        named = set().union(*(kernels_named(path.with_name(path.stem + ending), seen) for ending in SOURCES))
        for kernel in named:
            out.setdefault(kernel, []).append(path.stem)
    return out


def definitions(stem: str, kernels: list[Kernel], launched_by: dict[str, list[str]]) -> str:
    out = [f'#include "kernels/{stem}.h"', "", "namespace liger::kernels {", ""]
    for k in kernels:
        found = {v.index: f'"{v.name}"' for v in k.variants()}
        names = "".join(f"\n    {found.get(i, 'nullptr')}," for i in range(k.indices))
        out.append(f"static const char* const {k.name}_names[] = {{{names}\n}};")
        operators = ", ".join([f'"{o}"' for o in launched_by.get(k.name, [])] + ["nullptr"])
        out.append(f"static const char* const {k.name}_operators[] = {{{operators}}};")
        # The end of the last argument: a struct with maps has padding after it.
        *_, (_, _, offset, size) = k.layout
        fields = f'"{k.name}", "{k.symbol}", 0x{k.source_hash}ull, {k.indices}, {offset + size}, {k.name}_names'
        places = "nullptr, 0"
        if k.takes_maps:
            offsets = ", ".join(str(offset) for _, _, offset, _ in k.layout)
            out.append(f"static const uint32_t {k.name}_places[] = {{{offsets}}};")
            out.append(f"static_assert({len(k.layout)} <= runtime::kMostPlaced);")
            places = f"{k.name}_places, {len(k.layout)}"
        archs = "nullptr"
        if k.archs:
            archs = f"{k.name}_archs"
            out.append(f"static const int {archs}[] = {{{', '.join(map(str, [*k.archs, 0]))}}};")
        fields += f", {k.name}_operators, {places}, {archs}"
        out.append(f"runtime::Kernel {k.name}::kernel{{{{{fields}}}}};\n")
    return "\n".join([*out, "}  // namespace liger::kernels", ""])


def write_if_changed(path: Path, text: str) -> None:
    # An unchanged header keeps its time stamp, so that files that include it are not rebuilt.
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def generate(folder: Path) -> None:
    current, launched_by = modules(), operators_of()
    for stem, kernels in current.items():
        write_if_changed(folder / "kernels" / f"{stem}.h", header(stem, kernels))
        write_if_changed(folder / "kernels" / f"{stem}.cpp", definitions(stem, kernels, launched_by))
    for old in (folder / "kernels").glob("*"):
        if old.stem not in current:
            old.unlink()
