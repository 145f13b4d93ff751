"""Installations: progress that pip shows, folders that an installation leaves, editable installs, sources that shadow the
installed package, the environment that make creates, and metadata."""

import email
import fcntl
import os
import pty
import re
import runpy
import shutil
import subprocess
import sys
import termios
import venv
from pathlib import Path

import pytest
import setuptools

import liger_ops
from liger_ops._runtime import loader
from tests.support.host.stub_cuda import LIBRARIES, ROOT


def test_an_older_setuptools_is_an_error(monkeypatch):
    """Building would end in a traceback. pip does not check the version without build isolation."""
    monkeypatch.setattr(setuptools, "__version__", "70.3.0")
    with pytest.raises(
        SystemExit, match=r'needs setuptools 77 or newer \(got 70.3.0\): `pip install "setuptools>=77"`'
    ):
        runpy.run_path(str(ROOT / "setup.py"))


# ---- Progress.

# Prints what ninja and the compilation of the kernels print without a terminal. The first two files take 30 and 10 of 80
# expected seconds, the kernels 40.
NINJA = """
import time
for line in (
    "[1/20] Building CXX object folder/a.cpp.o",
    "[2/20] Building CXX object folder/small.o",
    "[2/20] Re-checking",
    "compiling kernels 140/280  12 s",
    "[20/20] Building CXX object folder/b.cpp.o",
):
    print(line, flush=True)
    time.sleep(0.4)
"""
# setup.py, too, loads the module from its file.
BUILD = f"""
import os, runpy, sys
progress = runpy.run_path({str(ROOT / "liger_ops/aot/progress.py")!r})
progress["say"]("liger-ops: no GPU")
progress["run"].__globals__["TICK"] = 0.1
progress["run"]([sys.executable, "-c", {NINJA!r}], os.environ, [("a.cpp.o", 30.0), ("b.cpp.o", 10.0)], 40.0)
"""


# By the time of steps and not their number. A busy machine may skip some.
SAID = [f"liger-ops: {share} % done, N s" for share in (0, 37, 62, 75)]


def hidden(terminal=None):
    """Output of BUILD as pip captures it, in a process with this terminal or with none."""

    def own_session():
        os.setsid()
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    return subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, preexec_fn=own_session)


def without_times(text):
    return re.sub(r"\d+ s\b", "N s", text)


def test_progress_reaches_the_terminal_although_pip_hides_the_output():
    reader, terminal = pty.openpty()
    done = hidden(terminal)
    assert done.returncode == 0, done.stderr
    os.close(terminal)
    shown = without_times(os.read(reader, 10_000).decode())
    os.close(reader)
    lines = [line.strip() for line in re.split(r"\r\n|\r\033\[K", shown) if line.strip()]
    assert lines[0] == "liger-ops: no GPU" and lines[-1] == "liger-ops: built in N s"
    # One line, which is updated more often than steps end.
    assert len(lines) > 7 and shown.count("\n") == 3
    assert {*lines[1:-1]} <= {*SAID} and lines[-2] == SAID[-1]


def test_progress_without_a_terminal_is_in_the_log():
    """As in a container: pip -v shows it. A line for every tenth."""
    done = hidden()
    first, *said, last = without_times(done.stderr).splitlines()
    assert (done.returncode, first, last) == (0, "liger-ops: no GPU", "liger-ops: built in N s"), done.stderr
    assert {*said} <= {*SAID} and len(said) == len({*said}) and said[-1] == SAID[-1]
    assert done.stdout.splitlines()[0] == "[1/20] Building CXX object folder/a.cpp.o"


def test_a_log_does_not_stay_silent(monkeypatch, capfd):
    from liger_ops.aot import progress

    monkeypatch.setattr(progress, "TICK", 0.01)
    monkeypatch.setattr(progress, "QUIET", 0.05)
    progress.run([sys.executable, "-c", "import time; time.sleep(0.5)"], os.environ, [("a.o", 1.0)])
    assert capfd.readouterr().err.count(" 0 % done") > 2


def test_the_share_of_a_repeated_build_is_of_its_own_steps():
    from liger_ops.aot.progress import Share

    share = Share([("a.o", 5.0), ("b.o", 3.0), ("b.o", 3.0), ("c.o", 1.0)], 0.0)
    assert float(share) == 0
    shares = []
    for line in ("[1/3] Building x/b.o", "[2/3] Building y/b.o", "[3/3] Linking z.so", "[0/1] Re-checking"):
        share.read(line)
        shares.append(float(share))
    assert shares[:3] == [3 / 11, 6 / 11, 1.0]


def test_a_build_that_fails_is_an_error(capfd):
    from liger_ops.aot import progress

    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        progress.run([sys.executable, "-c", "print('[1/2] a'); raise SystemExit(3)"], os.environ)
    assert "[1/2] a" in capfd.readouterr().out


# ---- Sources that shadow the installed package.


def source_folder(folder: Path) -> Path:
    """A copy of this checkout's package, not built."""
    ignored = shutil.ignore_patterns("lib", "packs", "__pycache__", "_declared.pyi")
    shutil.copytree(ROOT / "liger_ops", folder / "liger_ops", ignore=ignored)
    shutil.copy(ROOT / "setup.py", folder)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return source_folder(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder like site-packages with the package that is built here, and its metadata."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "liger_ops").symlink_to(ROOT / "liger_ops")
    metadata = folder / f"liger_ops-{liger_ops.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: liger-ops\nVersion: {liger_ops.__version__}\n")
    return folder


def run_in(folder, *command, path=()):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def warning(done):
    (line,) = [line for line in done.stderr.splitlines() if "RuntimeWarning: liger_ops" in line]
    return line.partition("RuntimeWarning: ")[2]


def test_sources_that_shadow_the_installed_package_say_so(sources, installed):
    said = warning(run_in(sources, "-c", "import liger_ops", path=[installed]))
    assert f"there is none in {sources}/liger_ops/lib" in said
    assert said.endswith(
        f"The sources in {sources} shadow the installed package, {ROOT}/liger_ops: run Python in another folder, or build "
        f"these sources with `make build` or `pip install --no-build-isolation -e .` in {sources}"
    )


def test_sources_that_are_not_built_say_how(sources):
    said = warning(run_in(sources, "-c", "import liger_ops"))
    assert said.endswith(
        f"Build these sources with `make build` or `pip install --no-build-isolation -e .` in {sources}"
    )


@pytest.mark.thorough
def test_cmake_finds_the_installed_package_from_the_sources(sources, installed):
    command = ["-W", "ignore", "-m", "liger_ops", "--cmake-prefix"]
    assert run_in(sources, *command, path=[installed]).stdout.strip() == str(ROOT / "liger_ops")
    assert run_in(sources, *command).stdout.strip() == str(sources / "liger_ops")


def test_a_built_package_shadows_nothing(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    assert loader.shadowed() is None


# ---- Editable installs and folders.

# CMake, replaced by a program that writes what a build of this folder would.
STUB = """
import json, os, shutil, subprocess, sys
from pathlib import Path

class Build(subprocess.Popen):
    def __init__(self, command, **options):
        if command[0] == "cmake":
            given = dict(word[2:].split("=", 1) for word in command if word.startswith("-D"))
            folder = Path(command[command.index("-B" if given else "--build") + 1])
            if given:
                Build.given = given
                folder.mkdir(parents=True, exist_ok=True)
            else:
                shutil.copytree({libraries!r}, Path(Build.given["LIGER_OUTPUT"], "lib"))
            command = ["true"]
        super().__init__(command, **options)

subprocess.Popen = Build
os.environ["LIGER_OPS_ARCHS"] = "none"
from setuptools import build_meta
print(getattr(build_meta, {hook!r})({target!r}))
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that a build needs."""
    folder = tmp_path / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        if name.startswith(("liger_ops/", "csrc/")) or "/" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built_by(hook, checkout, target):
    target.mkdir()
    code = STUB.format(libraries=str(LIBRARIES), hook=hook, target=str(target))
    done = run_in(checkout, "-c", code)
    return target / done.stdout.splitlines()[-1]


WHERE = """
import importlib.metadata, site, sys
from pathlib import Path
# Without the checkout that `make build` linked to this environment.
linked = {line for folder in site.getsitepackages() for link in Path(folder).glob("liger_ops.pth")
          for line in link.read_text().split()}
sys.path[:] = [folder for folder in sys.path if folder not in linked]
site.addsitedir(sys.argv[1])
import liger_ops
print(importlib.metadata.version("liger-ops"), liger_ops.__file__, liger_ops._loaded.library)
"""


@pytest.mark.thorough
def test_an_editable_install_imports_the_checkout(checkout, tmp_path):
    wheel = built_by("build_editable", checkout, tmp_path / "wheel")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    package = checkout / "liger_ops"
    library = package / "lib" / f"libliger_ops_torch{loader.torch_minor()}.so"
    for folder in (tmp_path, checkout):
        found = run_in(folder, "-c", WHERE, str(tmp_path / "site")).stdout.split()
        assert found == [liger_ops.__version__, str(package / "__init__.py"), str(library)]
    # The next build reuses the folder.
    assert len([*(checkout / "build").glob("*-torch*")]) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("built_in_place", [False, True])
def test_an_installation_leaves_no_folder_that_only_it_needed(built_in_place, checkout, tmp_path):
    if built_in_place:
        (checkout / "liger_ops" / "lib").mkdir()
    wheel = built_by("build_wheel", checkout, tmp_path / "wheel")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    assert {path.name for path in LIBRARIES.glob("lib*.so")} <= {*os.listdir(tmp_path / "site" / "liger_ops" / "lib")}
    assert (tmp_path / "site" / "liger_ops" / "share" / "src" / "csrc" / "library.cpp").exists()
    assert [path.name for path in (checkout / "build").glob("lib*")] == []
    assert len([*(checkout / "build").glob("*-torch*")]) == built_in_place


# ---- The environment that make creates.


def test_python_of_make_imports_the_checkout_from_any_folder(tmp_path):
    checkout, elsewhere = tmp_path / "check out", tmp_path / "elsewhere"
    (checkout / "examples").mkdir(parents=True)
    elsewhere.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    (checkout / "liger_ops").mkdir()
    (checkout / "liger_ops" / "__init__.py").touch()
    (checkout / "examples" / "some.py").write_text("import liger_ops; print(liger_ops.__file__)")
    # make calls it with `-m venv .venv`. A pip that installs nothing.
    venv.create(checkout / ".venv", with_pip=False)
    python = checkout / ".venv" / "bin" / "python"
    (pip,) = [path / "pip" for path in (checkout / ".venv").glob("lib/python*/site-packages")]
    pip.mkdir()
    (pip / "__main__.py").touch()
    done = subprocess.run(["make", "BASE=true", ".venv/ready"], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, checkout / "examples" / "some.py"]
    found = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, env=environment)
    assert found.stdout.strip() == str(checkout / "liger_ops" / "__init__.py"), found.stderr


# ---- The metadata


@pytest.fixture(scope="module", params=["", "https://example.org/someone/liger-ops/"])
def metadata(request, tmp_path_factory):
    """The repository's address, and what a package index reads."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "dist_info", "--output-dir", folder]
    env = {**os.environ, "LIGER_OPS_REPOSITORY": request.param}
    subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    (file,) = folder.glob("*.dist-info/METADATA")
    return request.param.rstrip("/"), email.message_from_string(file.read_text())


@pytest.mark.thorough
def test_the_metadata_is_complete(metadata):
    address, found = metadata
    assert {"Name", "Version", "Summary", "License-Expression", "License-File", "Keywords", "Classifier"} <= {
        *found.keys()
    }
    assert found["Requires-Python"] == ">=3.10" and found["Description-Content-Type"] == "text/markdown"
    urls = dict(line.split(", ") for line in found.get_all("Project-URL", []))
    assert {*urls} == ({"Source", "Issues", "Documentation", "Changelog"} if address else set())
    assert all(url.startswith(address) for url in urls.values())


def test_links_of_the_readme_lead_into_the_repository(metadata):
    """And to a file of it. Pictures are files and no pages."""
    address, found = metadata
    readme = found.get_payload()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", readme)
    assert len(links) > 20 and readme.startswith("# liger-ops\n")
    for picture, link in links if address else []:
        place = f"{address}/{'raw' if picture else 'blob'}/v{found['Version']}/"
        assert link.startswith(place) and (ROOT / link.removeprefix(place).partition("#")[0]).exists(), link
