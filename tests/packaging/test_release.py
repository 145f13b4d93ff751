"""Releases: libraries for older systems and other torch versions, the wheel, the sdist and the version."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import liger_ops
from liger_ops.aot import archs, built, flags, machines, manylinux, torch_release
from tests.support.checks import output_of, run_python
from tests.support.host.stub_cuda import LIBRARIES, ROOT, compile_cpp

HERE = machines.asked_for("")
RESULTS = ROOT / "benchmarks" / "results"
RUNTIME = LIBRARIES / "libliger_runtime.so"
TORCH = [Path(torch.__file__).parent / "lib" / name for name in ("libc10.so", "libtorch.so", "libtorch_cpu.so")]

# ---- Libraries load on every system that the wheel's tag covers.


def library(name: str, code: str, folder: Path, *flags: str) -> Path:
    source = folder / f"{name}.cpp"
    source.write_text(code)
    return compile_cpp(f"lib{name}.so", source, flags=("-shared", "-fPIC", *flags))


def test_shipped_libraries_load_on_older_systems():
    shipped = sorted(LIBRARIES.glob("lib*.so"))
    found = [sentence for path in shipped for sentence in manylinux.violations(path, HERE)]
    assert len(shipped) >= 2
    assert found == []


def test_symbols_missing_on_older_systems_are_named(tmp_path):
    code = '#include <unistd.h>\nextern "C" int draw(char* c) { return getentropy(c, 1); }\n'
    fine = library("fine", code, tmp_path)
    assert manylinux.violations(fine, HERE) == []
    older = HERE._replace(glibc=(2, 24))
    assert manylinux.violations(fine, older) == ["libfine.so: getentropy needs GLIBC_2.25"]


def test_a_library_outside_the_standard_set_is_named(tmp_path):
    elsewhere = library("elsewhere", "", tmp_path)
    needing = ("-Wl,--no-as-needed", f"-L{elsewhere.parent}", "-lelsewhere")
    other = library("other", "", tmp_path, *needing)
    assert manylinux.violations(other, HERE) == ["libother.so: needs libelsewhere.so"]


@pytest.mark.thorough
def test_every_symbol_of_the_operators_has_a_definition():
    """The linker allows undefined symbols, because torch's libraries are incomplete without their dependencies."""
    operators = liger_ops._loaded.library
    assert manylinux.missing_symbols(operators, [RUNTIME, *TORCH]) == []
    missing = manylinux.missing_symbols(operators, TORCH)
    assert missing and all("is not defined by any of its libraries" in sentence for sentence in missing)


def test_libraries_contain_no_build_paths(tmp_path):
    """Builds of one commit are equal, independent of the folder."""
    places = [ROOT, Path(torch.__file__).parents[1]]
    assert [sentence for path in LIBRARIES.glob("lib*.so") for sentence in manylinux.build_paths(path, places)] == []
    code = f'extern "C" const char* built_in() {{ return "{ROOT}/build"; }}\n'
    named = library("named", code, tmp_path)
    assert manylinux.build_paths(named, places) == [f"libnamed.so: contains the path {ROOT}"]


# ---- Torch releases that are not installed.


def test_only_files_needed_by_a_build_are_unpacked(tmp_path):
    wanted = ["torch/include/ATen/ATen.h", "torch/lib/libc10.so", "torch/share/cmake/Torch/TorchConfig.cmake"]
    with zipfile.ZipFile(tmp_path / "torch.whl", "w") as archive:
        for name in (*wanted, "torch/lib/libtorch_cuda.so", "torch/nn/__init__.py"):
            archive.writestr(name, "")
    torch_release.unpack(tmp_path / "torch.whl", tmp_path / "out")
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()) == wanted


STANDARDS = {
    "until 2.14": ("set_target_properties(torch PROPERTIES\n    CXX_STANDARD 20\n)", 17, 20),
    "since 2.15": (
        'if("cxx_std_23" IN_LIST FEATURES)\n  target_compile_features(torch INTERFACE cxx_std_20)\nendif()',
        20,
        20,
    ),
    "in the headers only": ("# CXX_STANDARD 23", 23, 23),
    "older than ours": ("    CXX_STANDARD 17", 17, 20),
}


def write_torch(config: str, header: str, folder: Path) -> Path:
    for path, text in {"share/cmake/Torch/TorchConfig.cmake": config, "include/ATen/ATen.h": header}.items():
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(text)
    return folder


@pytest.mark.parametrize("where", STANDARDS)
def test_the_cxx_standard_is_torchs(where, tmp_path):
    config, least, standard = STANDARDS[where]
    write_torch(config, f"#error C++{least} or later compatible compiler is required to use ATen.\n", tmp_path)
    assert torch_release.cxx_standard(tmp_path) == standard


@pytest.mark.parametrize(
    ("config", "header", "got"),
    [
        ("", "", "none from .*TorchConfig.cmake, none from .*ATen.h"),
        (" CXX_STANDARD 17\n", "#error C++20 or later", "17 from .*TorchConfig.cmake, 20 from .*ATen.h"),
        (" CXX_STANDARD 17\n CXX_STANDARD 20\n", "", "17, 20 from .*TorchConfig.cmake, none from .*ATen.h"),
    ],
)
def test_a_torch_without_a_clear_standard_stops_the_build(config, header, got, tmp_path):
    write_torch(config, header, tmp_path)
    with pytest.raises(SystemExit, match=rf"torch must state one C\+\+ standard that its headers accept \(got {got}\)"):
        torch_release.cxx_standard(tmp_path)


def test_a_release_is_downloaded_once(tmp_path, monkeypatch):
    commands = []

    def download(command):
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "torch-2.11.0.whl", "w") as archive:
            archive.writestr("torch/include/header.h", "")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(torch_release.subprocess, "run", download)
    for _ in range(2):
        assert (torch_release.fetch("2.11", tmp_path, HERE) / "include" / "header.h").exists()
    (command,) = commands
    assert "--no-deps" in command and command[-1] == "torch==2.11.0"
    assert [p.name for p in tmp_path.iterdir()] == [f"2.11.0-{HERE.name}"]


def test_a_release_that_cannot_be_downloaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_release.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match=f"torch 2.11.0 for {HERE.name}, to build for torch 2.11, was not downloaded"):
        torch_release.fetch("2.11", tmp_path, HERE)
    assert [*tmp_path.iterdir()] == []


def test_other_files_agree_with_the_release_table(monkeypatch):
    """A new minor version is added in one place; other mentions are checked against it."""
    minors = [*torch_release.RELEASES]
    assert minors == sorted(minors, key=lambda minor: [*map(int, minor.split("."))])
    assert all(re.fullmatch(rf"{re.escape(minor)}\.\d+", release) for minor, release in torch_release.RELEASES.items())
    assert torch_release.asked_for("") == [] and torch_release.asked_for("all") == minors
    assert torch_release.asked_for("2.13, 2.11 2.13") == ["2.13", "2.11"]
    with pytest.raises(SystemExit, match=rf"must be all or among {', '.join(minors)} \(got 1.0\)"):
        torch_release.asked_for("2.11 1.0")
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^TORCH_VERSIONS \?= (.*)", makefile, re.M) == ["all"]
    assert re.findall(r"^TORCH \?= torch==(.*)", makefile, re.M)[0] in torch_release.RELEASES.values()
    assert f'"torch>={minors[0]}"' in (ROOT / "pyproject.toml").read_text()


def test_a_page_lists_the_test_results_of_each_release():
    text = (ROOT / "docs/installation.md").read_text()
    section = text.split("## Torch versions")[1].split("\n#")[0]
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \|(.*)\|(.*)\|(.*)\|$", section, re.M)
    assert {release for release, *_ in rows} == {*torch_release.RELEASES.values()}
    for release, _, *results in rows:
        for result in results:
            assert re.fullmatch(r"not run|\d+ passed( on [\w ]+)?", result.strip()), f"{release}: {result}"


def test_a_page_lists_the_cards_that_each_pack_has_run_on():
    """Cards whose results the repository holds."""
    text = (ROOT / "docs/installation.md").read_text().split("\n| pack |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text, re.M))
    assert {*rows} == {*(f"sm_{arch}" for arch in archs.ALL), "ptx"}
    cards = {card for said in rows.values() if said != "not run" for card in said.split(", ")}
    assert cards == {
        card for card in ("A100", "H100", "H200", "B200") if list(RESULTS.glob(f"nvidia-{card.lower()}-*"))
    }


def test_the_installed_torch_is_among_the_releases():
    assert liger_ops._runtime.loader.torch_minor() in torch_release.RELEASES


# ---- The wheel and the sdist.

TAGS = """
import json, os, runpy, setuptools, sys
found = {}
setuptools.setup = lambda **keywords: found.update(keywords)
for machine, versions in json.loads(sys.argv[1]):
    os.environ |= {"LIGER_OPS_MACHINE": machine, "LIGER_OPS_TORCH_VERSIONS": versions}
    runpy.run_path("setup.py")
    wheel = found["cmdclass"]["bdist_wheel"](setuptools.Distribution({"name": "liger-ops", "ext_modules": [1]}))
    wheel.ensure_finalized()
    print("-".join(wheel.get_tag()))
"""


def tags(*asked):
    """Of wheels for a machine and torch versions."""
    command = [sys.executable, "-c", TAGS, json.dumps(asked)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_tags_of_wheels():
    """For several torch versions, a wheel serves every Python; for the installed torch, this Python and machine."""
    done = tags(*((machine, "2.11 2.13") for machine in ("", *machines.MACHINES)), ("", ""))
    *several, one = done.stdout.split()
    names = (HERE.name, *machines.MACHINES)
    assert several == [f"py3-none-manylinux_2_28_{name}" for name in names], done.stderr
    assert one.startswith(f"cp{sys.version_info[0]}{sys.version_info[1]}-") and one.endswith(f"_{HERE.name}")
    done = tags(("aarch64", ""))
    sentence = "liger-ops: LIGER_OPS_MACHINE needs LIGER_OPS_TORCH_VERSIONS"
    assert (done.returncode, done.stderr.splitlines()[-1][: len(sentence)]) == (1, sentence)


WHEEL = """
import runpy, setuptools, zipfile
from setuptools.command import bdist_wheel

def run(command):
    with zipfile.ZipFile("some.whl", "w") as archive:
        archive.writestr("liger_ops/lib/libliger_ops_torch2.11.so", "")
    command.distribution.dist_files.append(("bdist_wheel", "any", "some.whl"))

bdist_wheel.bdist_wheel.run = run
found = dict()
setuptools.setup = lambda **keywords: found.update(keywords)
runpy.run_path({setup!r})
wheel = found["cmdclass"]["bdist_wheel"](setuptools.Distribution(dict(name="liger-ops", ext_modules=[1])))
wheel.ensure_finalized()
wheel.run()
print("fine")
"""


@pytest.mark.thorough
def test_a_wheel_without_a_required_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = WHEEL.format(setup=str(ROOT / "setup.py"))
    built = run_python(code, LIGER_OPS_TORCH_VERSIONS="2.11")
    assert built.stdout.splitlines()[-1] == "fine", built.stderr
    assert built.stderr.splitlines()[-1] == "liger-ops: pip install some.whl"
    done = run_python(code, LIGER_OPS_TORCH_VERSIONS="2.11 2.12 2.13")
    sentence = "liger-ops: some.whl has no library for torch 2.12, 2.13"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, sentence)


def test_the_sdist_contains_every_file_needed_by_a_build(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = [sys.executable, *f"setup.py -q egg_info --egg-base {tmp_path} sdist --dist-dir {tmp_path}".split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    assert path.name == f"liger_ops-{liger_ops.__version__}.tar.gz"
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if "." in name.rpartition("/")[2]}
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    folders = ("csrc/", "liger_ops/", "tests/", "examples/")
    folders += ("setup.py", "pyproject.toml", "CMakeLists.txt", "CHANGELOG.md")
    assert {name for name in tracked if name.startswith(folders)} <= names
    assert not [name for name in names if name.endswith((".so", ".pack", ".pyc"))]


def test_setuptools_requirements_match_pyproject():
    """setuptools before 77 rejects license expressions, and pip ignores `requires` without build isolation."""
    (least,) = re.findall(r'requires = \["setuptools>=(\d+)"\]', (ROOT / "pyproject.toml").read_text())
    assert int(least) >= 77
    # Without numpy, torch warns at its import.
    for path in ("README.md", "docs/installation.md", "Makefile"):
        text = (ROOT / path).read_text().replace("\\\n", "")
        commands = [c for c in text.splitlines() if "pip install" in c and "setuptools" in c]
        assert commands and all(f'"setuptools>={least}"' in c and '"numpy<2.4"' in c for c in commands), path


def test_make_installs_the_extras_of_pyproject():
    """make installs them before the package is built, so it lists them itself."""
    extras = dict(re.findall(r"^(\w+) = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.M | re.S))
    listed = {
        name: {re.split("[<>=]", item)[0]: item for item in re.findall(r'"(.*?)"', extras[name])} for name in extras
    }
    makefile = (ROOT / "Makefile").read_text()
    linters = re.search(r"^LINTERS \?= (.*)", makefile, re.M)[1].split()
    assert {*linters} == {item for name, item in listed["dev"].items() if name != "pre-commit"}
    assert {*re.search(r"^SITE \?= (.*)", makefile, re.M)[1].split()} == {*listed["docs"].values()}
    models = re.findall(r'"(.*?)"', re.search(r"^MODELS \?= (.*)", makefile, re.M)[1])
    assert {*models} <= {*listed["test"].values()}
    installed = {*re.search(r"pip install -q --no-compile (pytest .*) \$\(MODELS\)", makefile)[1].split(), "numpy"}
    assert {*listed["test"]} == installed | {re.split("[<>=]", item)[0] for item in models}


SHIPPED = """
import runpy, setuptools, sys
from pathlib import Path
found = {{}}
setuptools.setup = lambda **keywords: found.update(keywords)
runpy.run_path("setup.py")
build = found["cmdclass"]["build_ext"](setuptools.Distribution({{"name": "liger-ops"}}))
build.ship_sources(Path({target!r}), Path({generated!r}))
"""


def test_the_wheel_contains_the_operator_sources(tmp_path, monkeypatch):
    """With all headers that they include, so that `python -m liger_ops build` needs no checkout."""
    monkeypatch.chdir(ROOT)
    output_of(SHIPPED.format(target=str(tmp_path), generated=str(built.source_folders()[1])))
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.*")}
    assert {f"csrc/{path.relative_to(ROOT / 'csrc')}" for path in flags.sources(ROOT / "csrc")} <= files.keys()
    headers = [header for path in files.values() for header in re.findall(r'^#include "(.*)"', path.read_text(), re.M)]
    assert len(headers) > 50 and [h for h in headers if not {f"csrc/{h}", f"generated/{h}"} & files.keys()] == []


def test_the_version_is_in_one_place():
    assert (ROOT / "CHANGELOG.md").read_text().count(f"## {liger_ops.__version__}") == 1
    for path in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md"):
        assert f'"{liger_ops.__version__}"' not in (ROOT / path).read_text()
