"""Compiler and linker flags of the operator library. Both CMake (through setup.py) and `python -m liger_ops build` use
them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

# Relative to csrc.
SOURCES = ("ops/**/*.cpp", "gemm/*/*.cpp", "core/**/*.cpp", "library.cpp")
# These are compiled alone. Only namespace.cpp knows the namespace; portable.cpp is also in the runtime.
ALONE = ("core/namespace.cpp", "runtime/portable.cpp")
# A compiler reads torch's headers, and compiles what it takes from them, once for several sources of up to this size
# together: that is most of the time of a small one. With six such units, a machine of six cores has work for each.
UNIT_BYTES = 110_000
# Of a core, for a byte of sources.
SECONDS = 3e-4
# Included before every source.
PORTABLE = "runtime/portable.h"

# The operators are torch.ops.<NAMESPACE>.*.
NAMESPACE = "liger"

# OpenMP symbols come from torch's own runtime: linking another one would create a second thread pool.
# torch's headers include those of single operators instead of all. Without traps, as torch itself is compiled, a loop
# may compute both results of a choice: otherwise GCC does not vectorize many loops that have one.
COMPILE = (
    "-O3", "-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS", "-fPIC", "-fvisibility=hidden", "-fno-trapping-math", "-fopenmp",
    "-Wall", "-Wno-unknown-pragmas",
    # Of GCC, for its time: units grow by 5 % when functions are inlined, not by 40, and garbage is collected from
    # 300 MB on.
    "--param=inline-unit-growth=5", "--param=ggc-min-heapsize=300000", "--param=ggc-min-expand=100",
)  # fmt: skip
# Undefined symbols are allowed because the dependencies of torch's libraries may be missing.
LINK = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--allow-shlib-undefined", "-Wl,--build-id=none")
# Besides, of a library in a wheel: without the symbols of debuggers.
LINK_FOR_RELEASE = ("-Wl,--strip-all",)


def alone(csrc: Path) -> list[Path]:
    return [csrc / name for name in ALONE]


def sources(csrc: Path) -> list[Path]:
    found = [path for pattern in SOURCES for path in sorted(csrc.glob(pattern))]
    return [*dict.fromkeys([*found, *alone(csrc)])]


def units(csrc: Path) -> list[list[Path]]:
    """Sources that are compiled at once, in order; the largest first, so that the last ones to end are short."""
    groups: list[list[Path]] = []
    for path in (path for path in sources(csrc) if path not in alone(csrc)):
        if groups and sum(map(size_of, (*groups[-1], path))) <= UNIT_BYTES:
            groups[-1].append(path)
        else:
            groups.append([path])
    groups += [[path] for path in alone(csrc)]
    return sorted(groups, key=lambda group: -sum(map(size_of, group)))


def size_of(path: Path) -> int:
    return path.stat().st_size


def write_units(csrc: Path, folder: Path) -> list[Path]:
    """What the compiler gets: sources, and files in `folder` that include several, written only if they changed."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for group in units(csrc):
        path = group[0] if len(group) == 1 else folder / f"{group[0].stem}-to-{group[-1].stem}.cpp"
        text = "".join(f'#include "{source.relative_to(csrc).as_posix()}"\n' for source in group)
        if path.parent == folder and not (path.exists() and path.read_text() == text):
            path.write_text(text)
        out.append(path)
    return out


def seconds(csrc: Path, written: list[Path]) -> list[tuple[str, float]]:
    """The files of a build, and the seconds that a core needs for each. written: what write_units returned."""
    return [(f"{path.name}.o", SECONDS * sum(map(size_of, group))) for group, path in zip(units(csrc), written)]


def compiler(default: str = "g++") -> list[str] | None:
    """The C++ compiler in CXX, else `default`; None if it is not on PATH."""
    command = shlex.split(os.environ.get("CXX", "")) or [default]
    return command if shutil.which(command[0]) else None


def answer(compiler: list[str], question: str) -> str:
    return subprocess.run([*compiler, question], capture_output=True, text=True).stdout.strip()


def compiles_for(compiler: list[str]) -> str:
    """The machine: the first part of names such as aarch64-linux-gnu."""
    return answer(compiler, "-dumpmachine").partition("-")[0]


def cxx_runtime(compiler: list[str], native: bool = True) -> list[str]:
    """Linker flags for the shared C++ runtime. A compiler that has only the static one would link a second runtime into
    torch's process, and its streams crash on the first error message."""
    if os.path.isabs(answer(compiler, "-print-file-name=libstdc++.so")):
        return []
    # The libraries of this system are not for another machine.
    for folder in ("usr/lib", "usr/lib64", "usr/lib/*-linux-gnu", "lib64") if native else ():
        for shared in Path("/").glob(f"{folder}/libstdc++.so.6"):
            return ["-nostdlib++", str(shared), "-lm"]
    raise SystemExit(f"liger-ops: neither {compiler[0]} nor the system has a shared C++ runtime, libstdc++.so.6")
