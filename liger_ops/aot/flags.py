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


def sources(csrc: Path) -> list[Path]:
    return [path for pattern in SOURCES for path in sorted(csrc.glob(pattern))]


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
