"""Compiler and linker flags of the operator library. Both CMake (through setup.py) and `python -m liger_ops build` use
them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

# Relative to csrc.
SOURCES = ("ops/**/*.cpp", "core/namespace.cpp", "runtime/portable.cpp", "library.cpp")
# A compiler reads the headers once for several sources, up to this size together.
UNIT_BYTES = 40_000
# Included before every source.
PORTABLE = "runtime/portable.h"
# Included next, in all sources except portable.cpp, which defines what these headers declare.
PRECOMPILED = ("core/autograd.h", "core/cpu.h", "core/cuda.h", "core/registration.h")

# The operators are torch.ops.<NAMESPACE>.*.
NAMESPACE = "liger"

# OpenMP symbols come from torch's own runtime: linking another one would create a second thread pool.
COMPILE = ("-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-Wall", "-Wno-unknown-pragmas")
# Undefined symbols are allowed because the dependencies of torch's libraries may be missing.
LINK = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--allow-shlib-undefined", "-Wl,--build-id=none")
# Besides, of a library in a wheel: without the symbols of debuggers, a fifteenth of the compressed size.
LINK_FOR_RELEASE = ("-Wl,--strip-all",)


def sources(csrc: Path) -> list[Path]:
    return [path for pattern in SOURCES for path in sorted(csrc.glob(pattern))]


def units(csrc: Path) -> list[list[Path]]:
    """Sources that are compiled at once: those of operators in order. The largest one is alone and comes first, so that it
    compiles while the others wait for their precompiled header."""
    everything = sources(csrc)
    largest = max(everything, key=size_of)
    groups: list[list[Path]] = []
    for path in everything:
        joins = groups and path.is_relative_to(csrc / "ops") and largest not in (path, groups[-1][0])
        if joins and sum(map(size_of, (*groups[-1], path))) <= UNIT_BYTES:
            groups[-1].append(path)
        else:
            groups.append([path])
    return sorted(groups, key=lambda group: (largest not in group, -sum(map(size_of, group))))


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
    """The files of a build that take long, and the seconds that a core needs for each. written: what write_units returned."""
    objects = [(f"{path.name}.o", 7e-4 * sum(map(size_of, group))) for group, path in zip(units(csrc), written)]
    return [("cmake_pch.hxx.gch", 35.0), *objects]


def empty_precompiled(build: Path) -> None:
    """Frees half a gigabyte. With its times, so that nothing is compiled again. GCC then reads the headers instead."""
    for path in build.glob("CMakeFiles/*/cmake_pch.hxx.gch"):
        times = path.stat()
        os.truncate(path, 0)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


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
