"""Wheels for other machines: the table of machines, the check of their libraries, and the build by a cross compiler."""

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from liger_ops.aot import flags, machines, manylinux, torch_release
from liger_ops.aot.machines import MACHINES
from tests.support.checks import run_python
from tests.support.host.found_packages import IMPORTED
from tests.support.host.stub_cuda import LIBRARIES, ROOT, compile_cpp

HERE = machines.asked_for("")
OTHER = next(machine for machine in MACHINES.values() if not machine.native)

# ---- The table.


def test_the_table_describes_this_machine():
    """Python itself is a program of this machine."""
    assert HERE.native and [machine for machine in MACHINES.values() if machine.native] == [HERE]
    python = Path(sys.executable).resolve()
    assert int.from_bytes(python.read_bytes()[18:20], "little") == HERE.elf
    headers = subprocess.run(["readelf", "-l", python], capture_output=True, text=True, check=True).stdout
    assert re.search(r"interpreter: \S*/(\S+)\]", headers)[1] == HERE.linker


def test_machines_differ_in_every_fact():
    assert {*MACHINES} == {"x86_64", "aarch64"}
    for fact in ("name", "elf", "linker", "tag", "compiler"):
        assert len({getattr(machine, fact) for machine in MACHINES.values()}) == len(MACHINES), fact
    assert all(MACHINES[name].tag == f"manylinux_2_28_{name}" for name in MACHINES)


def test_every_machine_selects_old_symbols():
    """Without its lines in portable.h, a machine's libraries would need the glibc of the machine that builds."""
    text = (ROOT / "csrc" / flags.PORTABLE).read_text()
    assert {*re.findall(r"defined\(__(\w+)__\)", text)} == {*MACHINES}


def test_another_machine_is_refused(monkeypatch):
    with pytest.raises(SystemExit, match=r"LIGER_OPS_MACHINE must be among x86_64, aarch64 \(got riscv64\)"):
        machines.asked_for("riscv64")
    monkeypatch.setattr(machines.platform, "machine", lambda: "riscv64")
    with pytest.raises(SystemExit, match=r"\(got riscv64\)"):
        machines.asked_for("")


def test_torch_of_the_machine_is_downloaded(tmp_path, monkeypatch):
    def refused(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    commands = []
    monkeypatch.setattr(torch_release.subprocess, "run", refused)
    with pytest.raises(SystemExit, match=f"torch 2.13.0 for {OTHER.name}, to build for torch 2.13, was not downloaded"):
        torch_release.fetch("2.13", tmp_path, OTHER)
    (command,) = commands
    assert command[command.index("--platform") + 1] == OTHER.tag
    # The torch of this machine, which is there, does not serve the other one.
    (tmp_path / f"2.13.0-{HERE.name}" / "torch").mkdir(parents=True)
    assert torch_release.fetch("2.13", tmp_path, HERE) == tmp_path / f"2.13.0-{HERE.name}" / "torch"
    with pytest.raises(SystemExit, match="was not downloaded"):
        torch_release.fetch("2.13", tmp_path, OTHER)


# ---- The check of libraries.


def library(name: str, folder: Path, *flags: str) -> Path:
    (folder / "empty.cpp").write_text("")
    return compile_cpp(f"lib{name}.so", folder / "empty.cpp", flags=("-shared", "-fPIC", *flags))


def for_other_machine(path: Path, folder: Path) -> Path:
    """The same library with the other machine's number in its header. What it needs stays."""
    data = path.read_bytes()
    (folder / path.name).write_bytes(data[:18] + OTHER.elf.to_bytes(2, "little") + data[20:])
    return folder / path.name


def test_a_library_for_another_machine_is_named(tmp_path):
    path = library("machine", tmp_path)
    sentence = f"libmachine.so: is not for {OTHER.name} (machine {HERE.elf} in its header, not {OTHER.elf})"
    assert manylinux.violations(path, HERE) == [] and manylinux.violations(path, OTHER) == [sentence]
    copy = for_other_machine(path, tmp_path)
    assert manylinux.violations(copy, OTHER) == [] and len(manylinux.violations(copy, HERE)) == 1


def test_a_library_needs_no_other_linker(tmp_path):
    linker = library("linker", tmp_path, f"-Wl,-soname,{OTHER.linker}")
    path = library("linked", tmp_path, "-Wl,--no-as-needed", str(linker))
    assert manylinux.violations(path, HERE) == [f"liblinked.so: needs {OTHER.linker}"]
    assert manylinux.violations(for_other_machine(path, tmp_path), OTHER) == []


def test_symbols_are_read_for_every_machine(tmp_path):
    runtime = LIBRARIES / "libliger_runtime.so"
    rows = manylinux.symbols(runtime)
    assert len(rows) > 50 and rows == manylinux.symbols(for_other_machine(runtime, tmp_path))
    assert ("GLOBAL", "UND", "dlopen", "GLIBC_2.2.5" if HERE.name == "x86_64" else "GLIBC_2.17") in rows


NEEDS_OLD_SYMBOLS = """
#include <dlfcn.h>
#include <sys/stat.h>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <vector>

extern "C" int64_t use(const char* path, double x, std::condition_variable* changed, std::mutex* mutex) {
  struct stat info;
  std::unique_lock<std::mutex> lock(*mutex);
  changed->wait(lock);
  auto shared = std::make_shared<std::vector<double>>(size_t(x));
  void* found = dlsym(dlopen(path, RTLD_NOW), path);
  return lstat(path, &info) + fstat(int(x), &info) + int64_t(std::exp(x) + std::log(x) + std::pow(x, x)) + !found +
         shared.use_count();
}
"""


@pytest.mark.parametrize("name, oldest", [("x86_64", "GLIBC_2.2.5"), ("aarch64", "GLIBC_2.17")])
def test_old_symbols_are_selected(name, oldest, tmp_path):
    """In the source, as that machine's compiler would see it."""
    others = [f"-U__{other}__" for other in MACHINES if other != name]
    (tmp_path / "gnu").mkdir()
    (tmp_path / "gnu" / "stubs-32.h").touch()  # glibc's headers take a machine without its macro for an old one
    command = ["g++", "-E", "-P", *others, f"-D__{name}__", f"-I{tmp_path}", str(ROOT / "csrc" / flags.PORTABLE)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    selected = dict(re.findall(r"\.symver (\w+), \w+@(GLIBC_[\d.]+)", re.sub(r'"\s+"', "", text)))
    assert len(selected) >= 6 and {*selected.values()} == {oldest}


@pytest.mark.parametrize(
    "machine", [machine for machine in MACHINES.values() if shutil.which(machine.compiler)], ids=lambda m: m.name
)
def test_libraries_load_on_older_systems(machine, tmp_path):
    """Compiled with portable.h and portable.cpp and without them, for the machines whose compiler is there: this one at
    least. The wheel's build checks every library."""
    (tmp_path / "use.cpp").write_text(NEEDS_OLD_SYMBOLS)
    portable = ROOT / "csrc" / "runtime"

    def compiled(name, *more):
        command = [machine.compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}", *more]
        subprocess.run([*command, str(tmp_path / "use.cpp"), "-o", str(tmp_path / name)], check=True)
        return manylinux.violations(tmp_path / name, machine)

    assert compiled("portable.so", "-include", str(portable / "portable.h"), str(portable / "portable.cpp")) == []
    newer = compiled("newer.so")
    assert "newer.so: is not for" not in " ".join(newer)
    # glibc 2.34 moved them to libc and gave them a version of their own.
    if tuple(map(int, platform.libc_ver()[1].split("."))) >= (2, 34):
        assert {"newer.so: dlopen needs GLIBC_2.34", "newer.so: lstat needs GLIBC_2.33"} <= {*newer}


# ---- The build.

CROSS = (
    IMPORTED
    + """
import json, os, runpy, subprocess
run = subprocess.run

def configure(command, **options):
    if command[0] != "cmake":
        return run(command, **options)
    print(json.dumps([command, options["env"]["CXX"]]))
    os._exit(sys.stdout.flush() or 0)

subprocess.run = configure
sys.argv = ["setup.py", "-q", "build_ext"]
runpy.run_path("setup.py", run_name="__main__")
"""
)


@pytest.fixture
def cross_build(tmp_path, monkeypatch):
    """setup.py in a folder that has torch for the other machine, with a cross compiler that answers questions alone."""
    for name in ("setup.py", "pyproject.toml", "README.md", "CMakeLists.txt", "csrc", "liger_ops"):
        (tmp_path / name).symlink_to(ROOT / name)
    torch = tmp_path / "build" / "torch" / f"2.13.0-{OTHER.name}" / "torch"
    for path, text in {"share/cmake/Torch/TorchConfig.cmake": " CXX_STANDARD 20\n", "include/ATen/ATen.h": ""}.items():
        (torch / path).parent.mkdir(parents=True)
        (torch / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()

    def run(answers: dict[str, str], **env: str):
        if answers:
            cases = "\n".join(f"{question}) echo {answer};;" for question, answer in answers.items())
            (tools / OTHER.compiler).write_text(f"#!/bin/sh\ncase $1 in\n{cases}\nesac\n")
            (tools / OTHER.compiler).chmod(0o755)
        settings = {"LIGER_OPS_TORCH_VERSIONS": "2.13", "LIGER_OPS_MACHINE": OTHER.name, "LIGER_OPS_ARCHS": "none"}
        return run_python(CROSS, **{"PATH": f"{tools}:/bin", "CXX": "", **settings, **env})

    return run


ANSWERS = {
    "-dumpmachine": f"{OTHER.name}-linux-gnu",
    "-print-file-name=libstdc++.so": "/usr/lib/gcc-cross/libstdc++.so",
}


def test_a_build_for_another_machine_uses_its_compiler(cross_build, tmp_path):
    done = cross_build(ANSWERS)
    assert done.returncode == 0, done.stderr
    command, compiler = json.loads(done.stdout.splitlines()[-1])
    options = dict(argument.removeprefix("-D").split("=", 1) for argument in command if argument.startswith("-D"))
    assert compiler == OTHER.compiler
    assert (options["CMAKE_SYSTEM_NAME"], options["CMAKE_SYSTEM_PROCESSOR"]) == ("Linux", OTHER.name)
    assert options["LIGER_TORCH_DIRS"] == str(tmp_path / "build" / "torch" / f"2.13.0-{OTHER.name}" / "torch")
    assert options["LIGER_CXX_RUNTIME"] == "" and "LIGER_PYBIND11_DIR" not in options
    # Objects of two machines do not meet.
    assert Path(command[command.index("-B") + 1]).name == f"release-{OTHER.name}"


@pytest.mark.parametrize(
    ("answers", "env", "sentence"),
    [
        pytest.param(
            {},
            {"PATH": "/nowhere"},
            f"building needs a C++ compiler: {OTHER.compiler}, or the one named in CXX",
            id="no compiler",
        ),
        pytest.param(
            ANSWERS | {"-dumpmachine": f"{HERE.name}-linux-gnu"},
            {"CXX": OTHER.compiler},
            f"{OTHER.compiler}, which CXX names, must compile for {OTHER.name} (got {HERE.name})",
            id="of this machine",
        ),
        pytest.param(
            ANSWERS | {"-print-file-name=libstdc++.so": "libstdc++.so"},
            {},
            f"neither {OTHER.compiler} nor the system has a shared C++ runtime, libstdc++.so.6",
            id="no C++ runtime",
        ),
    ],
)
def test_a_wrong_cross_compiler_is_named(answers, env, sentence, cross_build):
    done = cross_build(answers, **env)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"liger-ops: {sentence}")
