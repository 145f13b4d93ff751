"""Runs an aarch64 wheel on an x86-64 machine: QEMU emulates the processor, for Python and for torch's aarch64 wheel.

    make test-aarch64                                          # after make wheel MACHINE=aarch64
    python tests/packaging/emulated.py dist/*_aarch64.whl [--torch 2.13.0]

Every operator runs forward and backward on CPU, and is compared with its formula. Needs the commands qemu-aarch64-static,
mmdebstrap and aarch64-linux-gnu-g++, of Debian's packages qemu-user-static, mmdebstrap and g++-aarch64-linux-gnu. The first
run downloads a Debian for aarch64 and torch, 0.5 GB, and keeps them in build/emulated. CUDA's libraries, which torch needs
to load, are replaced by libraries of the same names, whose functions say that there is no device.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# liger_ops itself would import torch.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "liger_ops" / "aot")]
import manylinux  # noqa: E402
from machines import MACHINES  # noqa: E402
from wheel_check import EVERY_OPERATOR, SUPPORT  # noqa: E402

MACHINE = MACHINES["aarch64"]
# A release of Debian, and its Python: torch has a wheel for it.
DEBIAN, VERSION = "bookworm", "3.11"
PYTHON = f"usr/bin/python{VERSION}"
# Imported by torch and by the tests.
NEEDED = (
    *("typing_extensions", "sympy", "mpmath", "filelock", "networkx", "jinja2", "markupsafe", "fsspec"),
    *("pytest", "iniconfig", "pluggy", "packaging", "pygments"),
)
# Stands in for all libraries whose symbols have no version, too.
UNVERSIONED = "libnccl.so.2"
CPU = "neoverse-n1"
# As on that processor. Without this file, torch fails.
CPUINFO = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def make_system(folder: Path) -> None:
    """The files of a Debian for aarch64: a C library, a C++ runtime and Python."""
    options = ["--quiet", "--variant=extract", "--architectures=arm64", "--include=python3,libstdc++6,libgomp1,zlib1g"]
    subprocess.run(["mmdebstrap", *options, DEBIAN, str(folder)], check=True)
    (folder / "proc").mkdir(exist_ok=True)
    (folder / "proc" / "cpuinfo").write_text(CPUINFO)


def make_packages(folder: Path, torch: str) -> None:
    platforms = [f"--platform={MACHINE.tag}", f"--platform=manylinux2014_{MACHINE.name}"]
    options = ["-q", "--no-compile", "--no-deps", "--only-binary=:all:", f"--python-version={VERSION}", *platforms]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), f"torch=={torch}", *NEEDED]
    subprocess.run(command, check=True)


def make_stand_ins(folder: Path, torch: Path, root: Path) -> None:
    """Libraries with the names and functions of those that torch needs and nobody has."""
    libraries = [*(torch / "lib").glob("*.so*"), *torch.glob("_C.*.so")]
    present = [*libraries, root / PYTHON, *root.glob("lib/*/*.so.*"), *root.glob("usr/lib/*/*.so.*")]
    found = {path: manylinux.symbols(path) for path in present if path.is_file() and not path.is_symlink()}
    defined = {name for rows in found.values() for _, section, name, _ in rows if section != "UND"}
    missing = {
        (version, name)
        for path in libraries
        for binding, section, name, version in found[path]
        if binding == "GLOBAL" and section == "UND" and name not in defined
    }
    names = {name for path in libraries for name in manylinux.needed(path)} - {path.name for path in present}
    folder.mkdir()
    for library in sorted(names):
        # The version of a symbol of CUDA's is the name of its library.
        own = {
            name for version, name in missing if version == library or (library == UNVERSIONED and version not in names)
        }
        source, script = folder / f"{library}.s", folder / f"{library}.map"
        # Every function returns 100, cudaErrorNoDevice.
        source.write_text("".join(f".globl {name}\n{name}: mov w0, 100\nret\n" for name in sorted(own)))
        script.write_text(f"{library if own and library != UNVERSIONED else ''} {{ global: *; }};")
        command = [MACHINE.compiler, "-shared", "-nostdlib", f"-Wl,-soname,{library}", str(source)]
        subprocess.run([*command, f"-Wl,--version-script={script}", "-o", str(folder / library)], check=True)


def kept(folder: Path, make, *arguments) -> Path:
    """Makes a folder, unless an earlier run has."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}-partial")
        shutil.rmtree(partial, ignore_errors=True)
        make(partial, *arguments)
        partial.rename(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="2.13.0", help="the release to run with")
    parser.add_argument("--cpu", default=CPU, help="the processor that QEMU emulates")
    arguments = parser.parse_args()
    folder = ROOT / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    root = kept(folder / "debian", make_system)
    packages = kept(folder / f"torch-{arguments.torch}", make_packages, arguments.torch)
    cuda = kept(folder / f"cuda-{arguments.torch}", make_stand_ins, packages / "torch", root)
    target = folder / "target"
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(arguments.wheel) as archive:
        archive.extractall(target)

    def run(*command: str) -> None:
        paths = os.pathsep.join(map(str, (target, packages, SUPPORT)))
        variables = {"PYTHONPATH": paths, "LD_LIBRARY_PATH": str(cuda), "PATH": str(folder), "HOME": str(folder)}
        emulator = ["qemu-aarch64-static", "-cpu", arguments.cpu, "-L", str(root)]
        emulator += [word for name, value in variables.items() for word in ("-E", f"{name}={value}")]
        subprocess.run([*emulator, str(root / PYTHON), *command], check=True, cwd=folder)

    run("-c", EVERY_OPERATOR, str(target), "cpu")
    run("-m", "liger_ops", "doctor", "--device", "cpu")


if __name__ == "__main__":
    main()
