"""`python -m liger_ops build`: its compiler commands, the location of the library, and which library is loaded."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from liger_ops._runtime import loader
from liger_ops.aot import built, flags, operators, torch_release
from tests.support.checks import environment_of_tree, output_of
from tests.support.host.stub_cuda import LIBRARIES, ROOT

TORCH = Path(torch.__file__).parent
MINOR = loader.torch_minor()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Target folder of libraries, in place of the package's folder."""
    monkeypatch.setenv("LIGER_OPS_LIBRARY_DIR", str(tmp_path / "home"))
    return tmp_path / "home"


def build(*arguments, **env):
    command = [sys.executable, "-m", "liger_ops", "build", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment_of_tree(**env), capture_output=True, text=True)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The target folder and the commands of a build."""
    folder = tmp_path_factory.mktemp("planned")
    done = build("--dry-run", LIGER_OPS_LIBRARY_DIR=str(folder))
    assert done.returncode == 0 and list(folder.glob("*")) == [], done.stderr
    return folder, [shlex.split(line) for line in done.stdout.splitlines()]


# ---- Commands.


@pytest.mark.thorough
def test_every_source_is_compiled_with_the_flags_of_the_cmake_build(planned):
    *objects, link = planned[1]
    sources = [command[command.index("-c") + 1] for command in objects]
    units = flags.units(ROOT / "csrc")
    assert [Path(source).stem.partition("-to-")[0] for source in sources] == [group[0].stem for group in units]
    assert sorted(sum(units, [])) == sorted(flags.sources(ROOT / "csrc")) and len(units) > 6
    for command in objects:
        assert {*flags.COMPILE, f"-std=c++{torch_release.cxx_standard(TORCH)}"} <= {*command}
        assert f"{TORCH}/include" in command and f"-I{ROOT / 'csrc'}" in command
        assert command[command.index("-include") + 1] == str(ROOT / "csrc" / flags.PORTABLE)
    assert {*flags.LINK, "-lliger_runtime", f"-L{LIBRARIES}", f"-L{TORCH}/lib", "-Wl,-rpath,$ORIGIN"} <= {*link}
    assert [word for word in link if word.endswith(".o")] == [command[-1] for command in objects]


def test_cmake_has_no_flags_besides_those_in_flags_py():
    section = (ROOT / "CMakeLists.txt").read_text().split("# ---- The operators")[1].split("\n# ----")[0]
    for name in ("SOURCES", "COMPILE", "LINK"):
        assert f"${{LIGER_{name}}}" in section
    assert not [flag for flag in (*flags.COMPILE, *flags.LINK) if flag in section.split()]


def test_the_library_name_includes_the_stamp(planned):
    folder, commands = planned
    assert commands[-1][-1] == str(folder / f"libliger_ops_torch{MINOR}-{built.stamp()}.so")


# ---- Stamps.


@pytest.mark.parametrize("change", ["version", "nightly", "commit", "package", "source", "header"])
def test_a_stamp_changes_with_every_dependency(change, tmp_path, monkeypatch):
    sources = tmp_path / "csrc", tmp_path / "generated"
    for folder in sources:
        folder.mkdir()
        (folder / "some.h").write_text("one")
    (sources[0] / "some.cpp").write_text("one")
    monkeypatch.setattr(built, "source_folders", lambda: sources)
    before = built.stamp()
    assert built.stamp() == before
    match change:
        case "version":
            monkeypatch.setattr(built, "__version__", "9.9")
        case "nightly":
            monkeypatch.setattr(torch, "__version__", f"{MINOR}.0.dev20990101")
        case "commit":
            monkeypatch.setattr(torch.version, "git_version", "0123")
        case "package":
            monkeypatch.setattr(built, "PACKAGE", tmp_path)
        case "source":
            (sources[0] / "some.cpp").write_text("two")
        case "header":
            (sources[1] / "some.h").write_text("two")
    assert built.stamp() != before


def test_sources_in_the_wheel_take_precedence_over_a_checkout(tmp_path, monkeypatch):
    assert [folder.name for folder in built.source_folders()] == ["csrc", "generated"]
    assert built.source_folders()[0] == ROOT / "csrc" and (built.source_folders()[1] / "kernels").exists()
    monkeypatch.setattr(built, "SHIPPED", tmp_path)
    assert built.source_folders() == [tmp_path / "csrc", tmp_path / "generated"]


# ---- Which library is loaded.


def test_a_locally_built_library_takes_precedence_if_it_fits(home):
    home.mkdir()
    others = [f"libliger_ops_torch{MINOR}-0123456789ab.so", "libliger_ops_torch9.9-0123456789ab.so"]
    for name in (built.library_name(MINOR), *others):
        (home / name).touch()
    found = list(loader.candidates())
    fitting = [path for path, misfit in found if misfit is None]
    assert fitting == [home / built.library_name(MINOR), LIBRARIES / f"libliger_ops_torch{MINOR}.so"]
    against = {path.name: misfit for path, misfit in found if misfit}
    assert {against[name] for name in others} == {"built here from other sources or for another torch"}


REPORT = "import liger_ops, json; print(json.dumps([str(liger_ops._loaded.library), liger_ops._loaded.tried]))"


def test_a_library_that_fails_to_load_is_skipped(home):
    home.mkdir()
    broken = home / built.library_name(MINOR)
    broken.write_text("no ELF file")
    library, tried = json.loads(output_of(REPORT, LIGER_OPS_LIBRARY_DIR=str(home)))
    assert library == str(LIBRARIES / f"libliger_ops_torch{MINOR}.so")
    assert tried[broken.name].startswith("did not load: ")


def test_unwritable_folders_are_skipped(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    places = [tmp_path / "file" / "lib", tmp_path / "lib"]
    monkeypatch.setattr(built, "folders", lambda: places)
    assert operators.target_folder() == places[1]
    places.pop()
    with pytest.raises(SystemExit, match="file/lib can be written: set LIGER_OPS_LIBRARY_DIR"):
        operators.target_folder()


@pytest.mark.parametrize("asked", [True, False])
def test_the_requested_folder_comes_first(asked, home, monkeypatch):
    if not asked:
        monkeypatch.delenv("LIGER_OPS_LIBRARY_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    expected = [home, LIBRARIES] if asked else [LIBRARIES, Path("/cache/liger_ops/lib")]
    assert built.folders() == expected


# ---- Errors.


def test_without_a_compiler_the_error_says_what_to_install(home, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    sentence = r"^liger-ops: building needs a C\+\+ compiler, and no-such-compiler is not on PATH.*apt install g\+\+"
    with pytest.raises(SystemExit, match=sentence):
        operators.build(jobs=1, dry_run=False)


def test_compiler_output_is_shown_from_the_first_error(tmp_path):
    source = tmp_path / "wrong.cpp"
    source.write_text("#warning first\nint f() { return nothing; }\n")
    step = operators.Step(["g++", "-c", str(source)], tmp_path / "wrong.o")
    with pytest.raises(SystemExit) as stopped:
        operators.run(step)
    first, second = str(stopped.value).splitlines()[:2]
    assert first == "liger-ops: the compiler says:"
    assert second.startswith(f"{source}:2:") and "error: " in second and "nothing" in second
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.cpp"]


def test_the_first_error_stops_the_build(tmp_path, monkeypatch):
    """Units that have not started are not compiled."""
    ran = []

    def run(step):
        ran.append(step)
        time.sleep(0.02)
        raise SystemExit("wrong")

    monkeypatch.setattr(operators, "run", run)
    (tmp_path / "a.cpp").touch()
    unit = operators.Step(["-c", str(tmp_path / "a.cpp")], tmp_path / "a.o")
    steps = operators.Plan([unit] * 50, unit)
    with pytest.raises(SystemExit, match="wrong"):
        operators.run_all(steps, jobs=1)
    assert len(ran) < 25


def test_missing_generated_headers_are_named(home, tmp_path, monkeypatch):
    monkeypatch.setattr(built, "source_folders", lambda: [ROOT / "csrc", tmp_path / "generated"])
    with pytest.raises(SystemExit, match=r"generated must hold the generated headers: run `make build` once"):
        operators.plan(["g++"], tmp_path, home / "any.so")


# ---- A real build.


@pytest.mark.thorough
def test_one_unit_becomes_a_library_that_loads(home, tmp_path, monkeypatch):
    """One unit stands in for all, which would take minutes."""
    chosen = [
        ROOT / "csrc" / name for name in ("runtime/portable.cpp", "core/namespace.cpp", "ops/linear/projections.cpp")
    ]
    monkeypatch.setattr(flags, "sources", lambda csrc: chosen)
    monkeypatch.setattr(operators, "loaded_elsewhere", lambda: str(home / built.library_name(MINOR)))
    operators.build(jobs=2, dry_run=False)
    (library,) = home.iterdir()
    assert library.name == built.library_name(MINOR)
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert all(f"[{name}]" in needed for name in ("libliger_runtime.so", "libtorch.so", "libtorch_cpu.so", "libc10.so"))
    assert output_of(f"import torch; torch.ops.load_library({str(library)!r}); print('loaded')") == "loaded\n"
