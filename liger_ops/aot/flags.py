"""How the operator library is compiled and linked, for CMakeLists.txt (setup.py hands it on) and `python -m liger_ops
build` alike."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

# Below csrc.
SOURCES = ("ops/**/*.cpp", "runtime/portable.cpp", "library.cpp")
# Goes ahead of every source.
PORTABLE = "runtime/portable.h"
# Behind it, in all sources but portable.cpp, which defines what these would declare.
PRECOMPILED = ("core/autograd.h", "core/cpu.h", "core/cuda.h", "core/registration.h")

# OpenMP comes from the runtime that torch brings along: linking another one would mean two thread pools.
COMPILE = ("-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-Wall", "-Wno-unknown-pragmas")
# Torch's libraries are incomplete without their dependencies.
LINK = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--allow-shlib-undefined", "-Wl,--build-id=none")


def sources(csrc: Path) -> list[Path]:
    return [path for pattern in SOURCES for path in sorted(csrc.glob(pattern))]


def compiler() -> list[str] | None:
    """The C++ compiler of CXX, else g++."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    return command if shutil.which(command[0]) else None


def cxx_runtime(compiler: list[str]) -> list[str]:
    """A compiler without the shared C++ runtime would link its archive: a second runtime in torch's process, whose
    streams crash on the first error message."""
    asked = [*compiler, "-print-file-name=libstdc++.so"]
    if os.path.isabs(subprocess.run(asked, capture_output=True, text=True).stdout.strip()):
        return []
    for folder in ("usr/lib", "usr/lib64", "usr/lib/*-linux-gnu", "lib64"):
        for shared in Path("/").glob(f"{folder}/libstdc++.so.6"):
            return ["-nostdlib++", str(shared), "-lm"]
    raise SystemExit(f"liger-ops: neither {compiler[0]} nor the system has a shared C++ runtime, libstdc++.so.6")
