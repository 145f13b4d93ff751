"""Downloads headers and libraries of torch releases, to build the operators for versions that are not installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .machines import Machine

# The torch minors that a wheel supports. Each library is built against one patch release, which makes builds
# reproducible; the patch releases of a minor share their binary interface.
RELEASES = {
    "2.11": "2.11.0",
    "2.12": "2.12.1",
    "2.13": "2.13.0",
    "2.14": "2.14.1",
    "2.15": "2.15.0",
}
# The most bytes of a wheel for all of them.
MOST_BYTES = 60_000_000
# Any version would do: the needed libraries and headers are the same for all of them.
PYTHON = "3.12"
NEEDED = (
    "torch/include/",
    "torch/share/cmake/Torch/",
    "torch/lib/libc10.so",
    "torch/lib/libtorch.so",
    "torch/lib/libtorch_cpu.so",
)


# The C++ standard of csrc/ops. Torch states 17 until 2.11, and its headers take newer ones.
OURS = 20


def cxx_standard(torch: Path) -> int:
    """The C++ standard to compile with: ours, or a newer one of torch's CMake target, or else of its headers."""
    config, header = torch / "share" / "cmake" / "Torch" / "TorchConfig.cmake", torch / "include" / "ATen" / "ATen.h"
    # A property of the CMake target until torch 2.14, a compile feature since 2.15.
    named = r"^ *(?:CXX_STANDARD |target_compile_features\(torch INTERFACE cxx_std_)(\d+)"
    stated = re.findall(named, config.read_text(), re.M)
    least = re.findall(r"^#error C\+\+(\d+) or later", header.read_text(), re.M)
    found = {*map(int, stated or least)}
    if len(found) != 1 or (least and min(found) < max(map(int, least))):
        raise SystemExit(
            "liger-ops: torch must state one C++ standard that its headers accept "
            f"(got {', '.join(stated) or 'none'} from {config}, {', '.join(least) or 'none'} from {header})"
        )
    return max(OURS, *found)


def asked_for(versions: str) -> list[str]:
    """Parses LIGER_OPS_TORCH_VERSIONS into torch minors."""
    minors = [*dict.fromkeys(versions.replace(",", " ").split())]
    if minors == ["all"]:
        return [*RELEASES]
    for minor in minors:
        if minor not in RELEASES:
            rule = f"must be all or among {', '.join(RELEASES)} (got {minor})"
            raise SystemExit(f"liger-ops: LIGER_OPS_TORCH_VERSIONS {rule}")
    return minors


def library_name(minor: str) -> str:
    return f"libliger_ops_torch{minor}.so"


def require_libraries(minors: list[str], files: list[str], place: Path) -> None:
    """Exits with an error if `files` lacks the library of a minor."""
    present = {Path(name).name for name in files}
    missing = [minor for minor in minors if library_name(minor) not in present]
    if missing:
        raise SystemExit(f"liger-ops: {place} has no library for torch {', '.join(missing)}")


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(NEEDED)])


def fetch(minor: str, cache: Path, machine: Machine) -> Path:
    """The torch folder of a release for a machine, with the files that a build needs. Downloaded once, without
    dependencies."""
    version = RELEASES[minor]
    target = cache / f"{version}-{machine.name}"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", scratch]
            command += ["--platform", machine.tag, "--python-version", PYTHON, f"torch=={version}"]
            if subprocess.run(command).returncode:
                torch = f"torch {version} for {machine.name}, to build for torch {minor}"
                raise SystemExit(f"liger-ops: {torch}, was not downloaded: see pip's message above")
            (wheel,) = Path(scratch).glob("torch-*.whl")
            unpacked = Path(scratch) / "unpacked"
            unpack(wheel, unpacked)
            unpacked.rename(target)
    return target / "torch"
