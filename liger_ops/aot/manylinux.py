"""Checks that shared libraries load on every Linux that the wheel's tag covers: symbol versions, needed libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TAG = "manylinux_2_28_x86_64"
# The newest symbol versions that the tag guarantees.
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
SYSTEM = re.compile(r"lib(c|m|dl|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-x86-64\.so\.2")
OURS = re.compile(r"libliger_runtime\.so|lib(c10|torch|torch_cpu)\.so")
# Every torch loads an OpenMP runtime with GCC's entry points.
OPENMP = re.compile(r"GOMP_\w+|omp_\w+")


def read(tool: str, option: str, library: Path) -> str:
    return subprocess.run([tool, option, str(library)], capture_output=True, text=True, check=True).stdout


def violations(library: Path) -> list[str]:
    """One sentence for each symbol version or library that a system of this tag may lack."""
    found = []
    for version, symbol in re.findall(r"\*UND\*\s+\w+\s+\(?(\w+_[\d.]+)\)?\s+(\S+)", read("objdump", "-T", library)):
        family, _, number = version.rpartition("_")
        if family not in LIMITS or tuple(map(int, number.split("."))) > LIMITS[family]:
            found.append(f"{library.name}: {symbol} needs {version}")
    for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", read("readelf", "-d", library)):
        if not SYSTEM.fullmatch(needed) and not OURS.fullmatch(needed):
            found.append(f"{library.name}: needs {needed}")
    return found


def missing_symbols(library: Path, providers: list[Path]) -> list[str]:
    """One sentence for each symbol of `library` that neither a system library nor `providers` define."""
    wanted = re.findall(r" U (\w+)$", read("nm", "-D", library), re.M)
    defined = {name for provider in providers for name in re.findall(r" [A-TV-Zi] (\w+)", read("nm", "-D", provider))}
    missing = [name for name in wanted if name not in defined and not OPENMP.fullmatch(name)]
    return [f"{library.name}: {name} is not defined by any of its libraries" for name in missing]


def main(libraries: list[str]) -> None:
    found = [sentence for library in libraries for sentence in violations(Path(library))]
    if found:
        raise SystemExit("\n".join([f"not fit for {TAG}:", *found]))


if __name__ == "__main__":
    main(sys.argv[1:])
