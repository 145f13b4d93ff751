"""Checks that shared libraries load on every Linux that the wheel's tag covers: machine, symbol versions, needed
libraries. They must not contain paths of the machine that built them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .machines import Machine

# The newest symbol versions that the tag guarantees, besides those of glibc.
LIMITS = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
SYSTEM = re.compile(r"lib(c|m|dl|pthread|stdc\+\+|gcc_s)\.so\.\d+")
OURS = re.compile(r"libliger_runtime\.so|lib(c10|torch|torch_cpu)\.so")
# Every torch loads an OpenMP runtime with GCC's entry points.
OPENMP = re.compile(r"GOMP_\w+|omp_\w+")


def read(option: str, library: Path) -> str:
    """readelf reads the libraries of every machine, unlike objdump and nm."""
    return subprocess.run(["readelf", "-W", option, str(library)], capture_output=True, text=True, check=True).stdout


def symbols(library: Path) -> list[tuple[str, str, str, str]]:
    """(binding, section, name, version) of the dynamic symbols; UND is the section of those that are needed."""
    # Between visibility and section, there may be a note such as [VARIANT_PCS].
    row = r"(\w+) +\w+ +(?:\[.*?\] +)?(\w+) ([\w.$]+)(?:@+(\S+))?(?: \(\d+\))?$"
    return re.findall(row, read("--dyn-syms", library), re.M)


def needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", read("-d", library))


def violations(library: Path, machine: Machine) -> list[str]:
    """One sentence for each thing that a system with the machine's tag may lack: symbol versions and libraries."""
    # The machine stands in the header, behind 16 bytes and the type.
    if (elf := int.from_bytes(library.read_bytes()[18:20], "little")) != machine.elf:
        return [f"{library.name}: is not for {machine.name} (machine {elf} in its header, not {machine.elf})"]
    limits, found = {"GLIBC": machine.glibc, **LIMITS}, []
    for _, section, symbol, version in symbols(library):
        family, _, number = version.rpartition("_")
        known = family in limits and re.fullmatch(r"[\d.]+", number)
        if section == "UND" and version and not (known and tuple(map(int, number.split("."))) <= limits[family]):
            found.append(f"{library.name}: {symbol} needs {version}")
    for name in needed(library):
        if not SYSTEM.fullmatch(name) and not OURS.fullmatch(name) and name != machine.linker:
            found.append(f"{library.name}: needs {name}")
    return found


def build_paths(library: Path, folders: Sequence[Path]) -> list[str]:
    """One sentence for each folder of the building machine that a library names."""
    code = library.read_bytes()
    return [f"{library.name}: contains the path {folder}" for folder in folders if str(folder).encode() in code]


def missing_symbols(library: Path, providers: list[Path]) -> list[str]:
    """One sentence for each symbol of `library` that neither a system library nor `providers` define."""
    wanted = [
        name for bind, where, name, version in symbols(library) if (bind, where, version) == ("GLOBAL", "UND", "")
    ]
    defined = {name for provider in providers for _, where, name, _ in symbols(provider) if where != "UND"}
    missing = [name for name in wanted if name not in defined and not OPENMP.fullmatch(name)]
    return [f"{library.name}: {name} is not defined by any of its libraries" for name in missing]
