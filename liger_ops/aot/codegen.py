"""Variant tables -> C++: one header a kernel file, with typed argument structs and the config tables."""

from __future__ import annotations

from pathlib import Path

from ..kernels import Config, Kernel, modules

CPP_TYPES = {"i32": "int32_t", "i64": "int64_t", "fp32": "float", "map": "runtime::TensorMap"}
CPP_DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def args_struct(kernel: Kernel) -> str:
    fields, checks = [], []
    for name, kind, offset, _ in kernel.layout:
        hidden = name.endswith("_scratch")
        declaration = "const void*" if kind[0] == "*" else CPP_TYPES[kind]
        fields.append(f"    {declaration} {name}{' = nullptr' if hidden else ''};")
        checks.append(f"  static_assert(offsetof(Args, {name}) == {offset});")
    return "\n".join(["  struct Args {", *fields, "  };", *checks])


def points_served(kernel: Kernel, config: Config) -> str:
    """A bit for each point of the kernel's axes."""
    if len(kernel.axis_points) > 64:
        raise ValueError(f"{kernel.name}: {len(kernel.axis_points)} points on its axes, 64 at most")
    return hex(sum(config.serves(choices) << i for i, choices in enumerate(kernel.axis_points)))


def config_table(kernel: Kernel) -> str:
    names = list(kernel.configs[0].constexprs)
    rows = []
    for c in kernel.configs:
        values = [-1 if bound is None else bound for bound in (c.max_n, c.max_rows)]
        values += [points_served(kernel, c), str(c.aligned).lower(), c.num_warps, c.programs_per_sm]
        rows.append("      {" + ", ".join(map(str, values + [c.constexprs[n] for n in names])) + "},")
    fields = "".join(f" int {n};" for n in names)
    facts = "int64_t max_n, max_rows; uint64_t points; bool aligned;"
    struct = f"  struct Config {{ {facts} int num_warps; int programs_per_sm;{fields} }};"
    return "\n".join([struct, "  static constexpr Config configs[] = {", *rows, "  };"])


def axis_functions(kernel: Kernel) -> str:
    out = []
    for axis, values in kernel.axes.items():
        letters = [k for k, v in values[0].items() if isinstance(v, str)]
        out.append(f"  static constexpr int {axis}_count = {len(values)};")
        if letters:
            out.append(f"  static constexpr int {axis}({', '.join('runtime::DType ' + k for k in letters)}) {{")
            for i, value in enumerate(values):
                test = " && ".join(f"{k} == runtime::DType::{CPP_DTYPES[value[k]]}" for k in letters)
                out.append(f"    if ({test}) return {i};")
            out.append("    return -1;\n  }")
    sizes = ", ".join(str(len(v)) for v in kernel.axes.values())
    out.append(f"  static constexpr int axes[] = {{{sizes}}};")
    return "\n".join(out)


def header(kernels: list[Kernel]) -> str:
    includes = ['"runtime/kernel.h"', '"runtime/tensor_map.h"', "<cstddef>"]
    out = ["#pragma once", *(f"#include {i}" for i in includes), "", "namespace liger::kernels {"]
    for kernel in kernels:
        out += [f"\nstruct {kernel.name} {{", args_struct(kernel), config_table(kernel), axis_functions(kernel)]
        out += ["  static LIGER_RUNTIME_API runtime::Kernel kernel;", "};"]
    return "\n".join([*out, "\n}  // namespace liger::kernels", ""])


def definitions(stem: str, kernels: list[Kernel]) -> str:
    out = [f'#include "kernels/{stem}.h"', "", "namespace liger::kernels {", ""]
    for k in kernels:
        found = {v.index: f'"{v.name}"' for v in k.variants()}
        names = "".join(f"\n    {found.get(i, 'nullptr')}," for i in range(k.indices))
        out.append(f"static const char* const {k.name}_names[] = {{{names}\n}};")
        operators = ", ".join([f'"{o}"' for o in (stem, *k.operators)] + ["nullptr"])
        out.append(f"static const char* const {k.name}_operators[] = {{{operators}}};")
        # Where the last argument ends; a struct of maps goes on to their boundary.
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
    # An untouched header keeps its time stamp, and what includes it is not rebuilt.
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def generate(folder: Path) -> None:
    current = modules()
    for stem, kernels in current.items():
        write_if_changed(folder / "kernels" / f"{stem}.h", header(kernels))
        write_if_changed(folder / "kernels" / f"{stem}.cpp", definitions(stem, kernels))
    for old in (folder / "kernels").glob("*"):
        if old.stem not in current:
            old.unlink()
