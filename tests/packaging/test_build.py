"""The build, from kernel tables to an installed package: checks, generated code, caches and errors."""

import dataclasses
import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

import liger_ops.kernels as tables
from liger_ops._runtime import loader
from liger_ops.aot import archs, codegen, compile, pack, torch_release
from liger_ops.aot.compile import BuildError, compile_variant, cubin_parameters, ptx_parameters
from liger_ops.kernels.rows import rows_config
from tests.support.checks import output_of, run_python
from tests.support.host.found_packages import IMPORTED
from tests.support.host.stub_cuda import ARCHS, LIBRARIES, PACKS, ROOT, compile_cpp, driver_folder, sample

KERNEL = "column_sum"

# ---- Installing.


BUILDS = ["build_ext --inplace", "dist_info --output-dir {}", "bdist_wheel --dist-dir {}"]
FITTING = {"torch": "2.13.0", "triton": "3.6.0"}
TOOLS = ("g++", "cmake", "ninja")


@pytest.fixture
def machine_with(tmp_path):
    """Runs setup.py where these versions of packages and these programs exist, and setuptools, and nothing else."""
    packages, programs, out = tmp_path / "packages", tmp_path / "bin", tmp_path / "out"
    for folder in (packages, programs, out):
        folder.mkdir()
    installed = Path(importlib.util.find_spec("setuptools").origin).parents[1]
    for path in (*installed.glob("setuptools*"), *installed.glob("_distutils_hack"), *installed.glob("pkg_resources")):
        (packages / path.name).symlink_to(path)
    # Programs beside the interpreter are found too.
    python = programs / "python"
    python.symlink_to(sys._base_executable)

    def run(command, versions, tools):
        for name, version in versions.items():
            (packages / f"{name}.py").write_text(f"__version__ = {version!r}\n")
        for name in tools:
            (programs / name).symlink_to("/bin/false")
        env = {**os.environ, "PYTHONPATH": str(packages), "PATH": str(programs), "CXX": ""}
        for setting in ("LIGER_OPS_TORCH_VERSIONS", "LIGER_OPS_MACHINE"):
            env.pop(setting, None)
        line = [python, "-S", "setup.py", *command.format(out).split()]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=env)
        assert done.returncode == 1 and list(out.iterdir()) == [] and "Traceback" not in done.stderr, done.stderr
        return done

    return run


TORCH = "building needs the torch you will run with: install it first, then `pip install --no-build-isolation .`"
WRONG = {
    "no torch": ({}, TOOLS, TORCH),
    "old torch": (FITTING | {"torch": "2.10.0+cpu"}, TOOLS, "building needs torch 2.11 or newer (got 2.10.0+cpu)"),
    "no triton": (
        {"torch": "2.13.0"}, TOOLS, 'building needs Triton to compile the kernels: `pip install "triton>=3.6"` first',
    ),
    "old triton": (FITTING | {"triton": "3.5.1"}, TOOLS, "building needs triton 3.6 or newer (got 3.5.1)"),
    "no compiler": (FITTING, TOOLS[1:], "building needs a C++ compiler: g++, or the one named in CXX"),
    "no cmake": (FITTING, ("g++", "ninja"), "building needs CMake: `pip install cmake` first"),
    "no ninja": (FITTING, TOOLS[:2], "building needs ninja: `pip install ninja` first"),
}  # fmt: skip
# One function checks all of it, for every command.
COMMANDS = [(BUILDS[0], wrong) for wrong in WRONG] + [(command, "no ninja") for command in BUILDS[1:]]


@pytest.mark.parametrize("command, wrong", COMMANDS)
def test_what_a_build_needs_is_checked_before_anything_else(command, wrong, machine_with):
    """pip runs dist_info before it downloads dependencies, so the error saves a useless download of torch. Nothing is
    copied, configured or compiled."""
    versions, tools, sentence = WRONG[wrong]
    done = machine_with(command, versions, tools)
    assert done.stderr.splitlines()[-1].startswith(f"liger-ops: {sentence}")
    assert "copying" not in done.stdout and "running build_py" not in done.stdout


def test_a_build_refuses_the_torch_that_the_package_refuses():
    """And that no wheel has a library for."""
    (least,) = re.findall(r'^dependencies = \["torch>=([\d.]+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert least == next(iter(torch_release.RELEASES))


CONFIGURED = """
import json, runpy, subprocess
from types import SimpleNamespace
commands = []

def run(command, **_):
    commands.append(command)
    return SimpleNamespace(stdout="/")

class Process(subprocess.Popen):
    def __init__(self, command, **options):
        if command[0] == "cmake":
            commands.append(command)
            command = ["true"]
        super().__init__(command, **options)

subprocess.run, subprocess.Popen = run, Process
sys.argv = ["setup.py", "-q", {command}]
runpy.run_path("setup.py", run_name="__main__")
print(json.dumps([command for command in commands if command[0] == "cmake"]))
"""


def configured(folder, *command, **env):
    """The options that setup.py passes to CMake, and what it prints for users. The machine has no GPU unless `env` says
    otherwise."""
    code = IMPORTED + CONFIGURED.format(command=", ".join(map(repr, command)))
    done = run_python(code, **{"LD_LIBRARY_PATH": str(folder), "LIGER_OPS_ARCHS": "", **env})
    assert done.returncode == 0, done.stderr
    configure, build = json.loads(done.stdout.splitlines()[-1])
    assert build[:2] == ["cmake", "--build"]
    options = dict(argument.removeprefix("-D").split("=", 1) for argument in configure if argument.startswith("-D"))
    return options, done.stderr


INPLACE = ("build_ext", "--inplace")
GPUS = "9.0:132:Stub H200;8.6:84:Stub A40;7.5:40:Stub T4"


@pytest.mark.parametrize(
    "gpus, asked, archs",
    [
        ("", "", ""),
        (GPUS, "", "80,90"),
        pytest.param(GPUS, "120", "120", marks=pytest.mark.thorough),
        pytest.param(GPUS, "none", "", marks=pytest.mark.thorough),
        pytest.param("", "90 80", "80,90", marks=pytest.mark.thorough),
        pytest.param("", "all", "all", marks=pytest.mark.thorough),
    ],
)
def test_a_build_compiles_for_the_present_gpus(gpus, asked, archs, monkeypatch):
    monkeypatch.chdir(ROOT)
    stub = {"STUB_CUDA_DEVICES": gpus} if gpus else {"STUB_CUDA_FAIL": "cuInit=100"}
    found, said = configured(driver_folder(), *INPLACE, LIGER_OPS_ARCHS=asked, **stub)
    assert found["LIGER_ARCHS"] == (",".join(map(str, ARCHS)) if archs == "all" else archs)
    folder = Path(torch.__file__).parent
    assert found["LIGER_TORCH_DIRS"] == str(folder)
    assert found["LIGER_TORCH_STANDARDS"] == str(torch_release.cxx_standard(folder))
    assert ("has no GPU" in said and "LIGER_OPS_ARCHS=all" in said) == (not gpus and not asked)


def test_an_installed_build_is_for_this_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    command = ("build_ext", "--build-lib", str(tmp_path))
    found, said = configured(driver_folder(), *command, STUB_CUDA_DEVICES=GPUS)
    assert found["LIGER_ARCHS"] == "80,90" and found["LIGER_OUTPUT"] == str(tmp_path / "liger_ops")
    assert f"building for torch {loader.torch_minor()}; kernels for compute capability: 8.0, 9.0" in said
    assert (tmp_path / "liger_ops" / "share" / "src" / "csrc" / "library.cpp").exists()


FOUND = """
import os, runpy, setuptools
setuptools.setup = lambda **keywords: None
architectures = runpy.run_path("setup.py")["architectures"]
for asked in ("", "90", "none"):
    os.environ["LIGER_OPS_ARCHS"] = asked
    print(architectures())
"""


def test_a_wheel_for_several_torch_releases_is_for_all_gpus(monkeypatch):
    monkeypatch.chdir(ROOT)
    env = {"LIGER_OPS_TORCH_VERSIONS": "all", "STUB_CUDA_DEVICES": GPUS}
    found = output_of(FOUND, LD_LIBRARY_PATH=str(driver_folder()), **env)
    assert found.splitlines() == [str([*ARCHS]), "[90]", "[]"]


MOVED = """
import runpy, setuptools, sys
from pathlib import Path
setuptools.setup = lambda **keywords: None
fresh = runpy.run_path("setup.py")["fresh"]
print(*[fresh(Path(folder)) for folder in sys.argv[1:]])
"""


def test_a_checkout_that_was_moved_is_configured_anew(tmp_path):
    for name, source in (("here", ROOT), ("there", ROOT / "elsewhere"), ("none", None)):
        (tmp_path / name).mkdir()
        if source:
            (tmp_path / name / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n")
    folders = [str(tmp_path / name) for name in ("here", "there", "none")]
    done = subprocess.run([sys.executable, "-c", MOVED, *folders], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[] ['--fresh'] []\n", done.stderr


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(archs.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert archs.present() == []


def test_a_device_uses_the_pack_of_its_family():
    served = {(80, False): 80, (89, False): 80, (87, True): 87, (90, False): 90, (103, False): 100, (75, False): 75}
    served[121, True] = 121
    assert {device: archs.serving(*device) for device in served} == served


@pytest.mark.parametrize("asked", ["sm_90", "9.0", "75", ","])
def test_unsupported_architectures_are_refused(asked):
    with pytest.raises(SystemExit, match=rf"LIGER_OPS_ARCHS must be .* \(got '{asked}'\)"):
        archs.asked_for(asked)


# ---- Generated C++.


def test_generation_is_stable_and_leaves_unchanged_files_alone(tmp_path):
    codegen.generate(tmp_path)
    stems = {"column_sum", *tables.modules()}
    assert {p.name for p in (tmp_path / "kernels").iterdir()} == {f"{s}.{x}" for s in stems for x in ("h", "cpp")}
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "kernels").iterdir()}
    (tmp_path / "kernels" / "gone.h").touch()
    changed = tmp_path / "kernels" / "column_sum.h"
    changed.write_text("stale")
    codegen.generate(tmp_path)
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "kernels").iterdir()}
    assert {p for p in before if before[p] != after[p]} == {changed} and after[changed][1] == before[changed][1]
    assert after.keys() == before.keys()


@pytest.mark.parametrize("name", [k.name for k in tables.kernels()])
def test_every_config_is_reachable(name):
    kernel = tables.find(name)
    assert {v.index % len(kernel.configs) for v in kernel.variants()} == {*range(len(kernel.configs))}
    for config in kernel.configs:
        for letter, choices in config.only.items():
            assert {*choices} <= {point[letter] for point in kernel.axis_points}
    assert all(map(kernel.configs[-1].serves, kernel.axis_points))


@pytest.mark.parametrize("name", [k.name for k in tables.kernels()])
def test_every_argument_has_its_offset_asserted(name):
    kernel = tables.find(name)
    text = codegen.args_struct(kernel)
    assert re.findall(r"static_assert\(offsetof\(Args, ([\w.]+)\) == (\d+)\)", text) == [
        (codegen.member(kernel, a), str(o)) for a, _, o, _ in kernel.layout
    ]


CHOOSE = """
#include <cstdio>
#include <initializer_list>
{includes}
using namespace liger;
using runtime::DType;
using Longs = std::initializer_list<long>;
template <class K, class... Points>
void choose(Longs widths, Longs counts, Points... points) {{
  const auto point = runtime::point_of<K>(points...);
  bool always_aligned = true;
  for (const auto& c : K::configs) always_aligned = always_aligned && c.aligned;
  for (bool aligned : {{true, false}}) {{
    if (always_aligned && !aligned) continue;
    for (long n : widths) {{
      for (long rows : counts) {{
        const auto& config = runtime::first_fit<K>(n, aligned, point, rows);
        std::printf("%s %u\\n", K::kernel.spec().name, runtime::variant_index<K>(config, point));
      }}
    }}
  }}
}}
int main() {{
{calls}
}}
"""
CPP_DTYPES = {"fp32": "DType::F32", "fp16": "DType::F16", "bf16": "DType::BF16"}


def point_expressions(kernel):
    """Every combination of axis values, as the arguments that C++ would pass."""
    axes = []
    for axis, values in kernel.axes.items():
        choices = [[CPP_DTYPES.get(value[k], value[k]) for k in codegen.choosing(values)] for value in values]
        named = [f"kernels::{kernel.name}::{axis}({', '.join(map(str, c))})" for c in choices]
        axes.append(named if choices[0] else [str(i) for i in range(len(values))])
    return list(product(*axes))


def printed_by(code, folder):
    """A program over the runtime and the generated headers."""
    codegen.generate(folder)
    (folder / "program.cpp").write_text(code)
    flags = (f"-I{ROOT / 'csrc'}", f"-I{folder}", f"-L{LIBRARIES}", "-lliger_runtime", f"-Wl,-rpath,{LIBRARIES}")
    program = compile_cpp(folder.name, folder / "program.cpp", flags=flags)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


@pytest.mark.thorough
def test_cpp_and_python_choose_the_same_variant(tmp_path):
    """Both languages choose configs: every axis point of every table, on both sides of its limits."""
    everything = tables.kernels()

    def around(bounds):
        return sorted({1, 1 << 40} | {b + d for b in bounds if b is not None for d in (0, 1)})

    def longs(values):
        return f"{{{', '.join(f'{n}L' for n in values)}}}"

    limits = {
        k.name: [around(bounds) for bounds in zip(*((c.max_n, c.max_rows) for c in k.configs))] for k in everything
    }
    calls = [
        f"  choose<kernels::{k.name}>({', '.join([*(longs(values) for values in limits[k.name]), *points])});"
        for k in everything
        for points in point_expressions(k)
    ]
    headers = "\n".join(f'#include "kernels/{stem}.h"' for stem in tables.modules())
    chosen = printed_by(CHOOSE.format(includes=headers, calls="\n".join(calls)), tmp_path).splitlines()
    expected = [
        f"{k.name} {k.pick(point, width, aligned, count).index}"
        for k in everything
        for point in k.axis_points
        for aligned in (True, False)
        if aligned or not all(c.aligned for c in k.configs)
        for width in limits[k.name][0]
        for count in limits[k.name][1]
    ]
    # Not `==` of the lists: pytest would print a million lines.
    assert next((both for both in zip(chosen, expected) if both[0] != both[1]), None) is None
    assert len(chosen) == len(expected)
    # Every chosen variant is compiled, and every compiled variant is chosen by some call.
    assert set(chosen) == {f"{k.name} {v.index}" for k in everything for v in k.variants()}


# ---- Build-time assertions.


def kernel_like(**changes):
    return dataclasses.replace(tables.find(KERNEL), **changes)


def test_a_table_must_name_the_arguments_in_order():
    args = dict(tables.find(KERNEL).args)
    for wrong in (dict(reversed(args.items())), {**args, "more": "i32"}, {k: v for k, v in args.items() if k != "n"}):
        with pytest.raises(ValueError, match="column_sum: the table declares .* the kernel takes"):
            kernel_like(args=wrong)


class OtherLayout(tables.Kernel):
    """Declares a parameter layout that differs from the compiled kernel."""

    wrong: list = []

    @property
    def layout(self):
        return self.wrong or super().layout


def with_layout(change):
    kernel = OtherLayout(**{f.name: getattr(tables.find(KERNEL), f.name) for f in dataclasses.fields(tables.Kernel)})
    wrong = list(kernel.layout)
    change(wrong)
    object.__setattr__(kernel, "wrong", wrong)
    return kernel.variant(0)


def test_parameters_of_another_size_stop_the_build():
    def widen(layout):
        layout[3] = ("rows", "i64", 24, 8)

    with pytest.raises(BuildError, match=r"column_sum\[.*\]: PTX parameters differ from the table"):
        compile_variant(with_layout(widen), [90])


def test_parameters_at_another_offset_stop_the_build():
    def move(layout):
        layout[4] = ("n", "i32", 32, 4)

    with pytest.raises(BuildError, match="sm_90 parameters .* table"):
        compile_variant(with_layout(move), [90])


def test_an_argument_of_another_type_changes_the_compiled_parameters():
    args = {**tables.find(KERNEL).args, "rows": "i64"}
    binary = compile_variant(kernel_like(args=args).variant(0), [90])
    assert ptx_parameters(binary.ptx.decode()) == [8, 8, 8, 8, 4, 8, 8]
    assert cubin_parameters(binary.cubins[90]) == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 4), (40, 8), (48, 8)]


@pytest.mark.thorough
def test_too_much_shared_memory_stops_the_build(monkeypatch):
    wide = {"X": "bf16", "W": "bf16"}
    ring, own = (tables.find(k).pick(wide, 16384, True) for k in ("layer_norm_bwd", "layer_norm_fwd"))
    compile_variant(ring, [90])
    monkeypatch.setattr(compile, "MAX_SHARED_BYTES", 64 * 1024)
    with pytest.raises(BuildError, match=r"needs \d+ bytes of shared memory, limit 65536"):
        compile_variant(ring, [90])
    # Shared memory beyond the default limit must be dynamic.
    monkeypatch.setattr(compile, "PLAIN_SHARED_BYTES", 1024)
    monkeypatch.setattr(compile, "reserved_shared", lambda cubin: 2048)
    with pytest.raises(BuildError, match=r"needs \d+ bytes of shared memory, limit 1024"):
        compile_variant(own, [90])


def test_a_lane_that_might_change_threads_stops_the_build(monkeypatch):
    one = "#blocked = #ttg.blocked<{sizePerThread = [1]}>\nmodule {}"
    assert compile.one_layout(one) and not compile.one_layout("#blocked1 = #ttg.blocked<{}>\n" + one)
    assert not compile.one_layout(one + "ttg.convert_layout")
    monkeypatch.setattr(compile, "one_layout", lambda ttgir: False)
    compile_variant(tables.find(KERNEL).variant(0), [90])
    with pytest.raises(BuildError, match="a lane of a streamed row might change threads"):
        compile_variant(tables.find("layer_norm_bwd").pick({"X": "bf16", "W": "bf16"}, 4096, True), [90])


def test_a_lane_of_a_streamed_row_has_one_thread():
    assert rows_config(5120, 1, 2048, 3, 8, pieces=3, slots=5).constexprs["SLOTS"] == 5
    with pytest.raises(AssertionError, match="128 lanes of a streamed row for 256 threads"):
        rows_config(5120, 1, 1024, 5, 8, pieces=5, slots=11)
    assert rows_config(5120, 1, 1024, 5, 8, pieces=0, slots=0).num_warps == 8


def test_a_build_path_stops_the_build(monkeypatch):
    assemble = compile.assemble
    monkeypatch.setattr(compile, "assemble", lambda *a: assemble(*a) + str(ROOT / "liger_ops").encode())
    with pytest.raises(BuildError, match="carries a build path"):
        compile_variant(tables.find(KERNEL).variant(0), [90])


def test_an_architecture_that_the_assembler_does_not_know():
    with pytest.raises(BuildError, match="ptxas for sm_130 failed: "):
        compile_variant(tables.find(KERNEL).variant(0), [130])


def test_a_kernel_for_one_architecture_is_compiled_only_for_it():
    variant = tables.find("fused_linear_cross_entropy_exp_logits").variant(0)
    assert list(compile_variant(variant, [80, 90, 100]).cubins) == [90]
    with pytest.raises(BuildError, match=r"exp_logits\[.*\]: is for sm_90 alone"):
        compile_variant(variant, [80, 100])


@pytest.mark.parametrize("stem", [*(f"sm_{arch}" for arch in ARCHS), "ptx"])
def test_packs_contain_no_build_paths(stem):
    places = [str(ROOT), str(Path.home()), sys.prefix, "/tmp/", "site-packages"]
    places += [f"{stem}.py" for stem in tables.modules()]
    for entry in pack.read(PACKS / f"{stem}.pack")[2]:
        for place in places:
            assert place.encode() not in entry.binary, f"{entry.name}: {place}"


# ---- Cache keys: which edits recompile which kernels.

KEYS = """
import json, sys, types
package = types.ModuleType("liger_ops"); package.__path__ = [{folder!r}]
sys.modules["liger_ops"] = package
from liger_ops.kernels import kernels
from liger_ops.aot.compile import code_key
print(json.dumps({{k.name: [k.source_hash, [code_key(k, v) for v in k.variants()]] for k in kernels()}}))
"""


@pytest.fixture
def keys_after(tmp_path):
    copy = shutil.copytree(
        ROOT / "liger_ops", tmp_path / "liger_ops", ignore=shutil.ignore_patterns("*.so", "*.pack", "__pycache__")
    )

    def keys(file=None, old="", new=""):
        if file:
            path = copy / file
            text = path.read_text()
            assert text.count(old) >= 1
            path.write_text(text.replace(old, new, 1))
        # Python validates bytecode by size and mtime in seconds, and an edit may change neither.
        found = json.loads(output_of(KEYS.format(folder=str(copy)), PYTHONDONTWRITEBYTECODE="1"))
        if file:
            path.write_text(text)
        return found

    return keys


@pytest.mark.thorough
def test_an_edit_recompiles_only_the_kernels_it_affects(keys_after):
    before = keys_after()
    # A statement, a constant that two kernels share, a comment outside every kernel, and one config.
    column_sum, rms_norm = (f"kernels/norms/{stem}.py" for stem in ("column_sum", "rms_norm"))
    edits = [
        (column_sum, "sums += tl.load", "sums += 1.0 * tl.load", {"column_sum"}),
        (rms_norm, "ROUND_FIRST = tl.constexpr(2)", "ROUND_FIRST = tl.constexpr(64)", {"rms_norm_fwd", "rms_norm_bwd"}),
        (column_sum, "KERNELS = [", "# A remark.\nKERNELS = [", set()),
        (column_sum, "BLOCK_M=64, BLOCK_N=16", "BLOCK_M=32, BLOCK_N=16", {"column_sum"}),
    ]
    for *edit, expected in edits:
        after = keys_after(*edit)
        assert {name for name in before if before[name] != after[name]} == expected, edit
    # The source hash, which packs and caches check, changes together with the cache key.
    changed = after["column_sum"]
    assert changed[0] != before["column_sum"][0]
    configs = len(tables.find("column_sum").configs)
    assert [i % configs == 0 for i in range(len(changed[1]))] == [
        a != b for a, b in zip(changed[1], before["column_sum"][1])
    ]


def test_every_option_of_a_variant_is_in_its_key():
    """Also those that do not change the kernel's source hash, such as the number of warps of a trial."""
    variant = tables.find(KERNEL).variant(0)
    changes = dict(num_warps=2 * variant.config.num_warps, programs_per_sm=16, constexprs={}, aligned=False)
    assert variant.config.aligned and not variant.config.programs_per_sm
    configs = [variant.config, *(dataclasses.replace(variant.config, **{k: v}) for k, v in changes.items())]
    keys = [compile.code_key(variant.kernel, dataclasses.replace(variant, config=config)) for config in configs]
    # Of a kernel for one architecture, Triton compiles the same source otherwise.
    keys.append(compile.code_key(dataclasses.replace(variant.kernel, archs=(90,)), variant))
    assert len(set(keys)) == len(keys)


@pytest.mark.thorough
def test_a_compiler_option_recompiles_everything(keys_after):
    before = keys_after()
    options = {'"-O3"': '"-O2"', "PTX_CAPABILITY = 80": "PTX_CAPABILITY = 90", "line_info = True": "line_info = False"}
    for edit in options.items():
        after = keys_after("aot/compile.py", *edit)
        assert all(set(before[name][1]).isdisjoint(after[name][1]) for name in before), edit


@pytest.mark.thorough
def test_a_shared_helper_recompiles_the_kernels_that_use_it(keys_after):
    before = keys_after()
    after = keys_after("kernels/rows.py", "other=neutral).to(tl.float32)", "other=neutral).to(tl.float32) + 0.0")
    changed = {name for name in before if before[name] != after[name]}
    assert {"rms_norm_fwd", "rms_norm_bwd"} <= changed and not changed & {"column_sum"}


BUILD = """
import json, sys, types
package = types.ModuleType("liger_ops"); package.__path__ = [{package!r}]; sys.modules["liger_ops"] = package
from pathlib import Path
from liger_ops.aot import build
from liger_ops.kernels import find
few = [find("column_sum").variant(i) for i in {held}]
for archs in ([80, 90], [90], [100], []):
    build.build_packs(Path({folder!r}), Path({folder!r}, "cache"), archs, 1, few if archs else build.every_variant(archs))
    print(json.dumps(sorted(p.name for p in Path({folder!r}).iterdir())))
"""


@pytest.mark.thorough
def test_packs_are_built_for_the_requested_architectures(tmp_path):
    held = [variant.index for variant in sample(tables.find("column_sum"), 80)][:2]
    code = BUILD.format(package=str(ROOT / "liger_ops"), folder=str(tmp_path), held=held)
    both, one, other, none = map(json.loads, output_of(code).splitlines())
    assert both == ["cache", "ptx.pack", "sm_80.pack", "sm_90.pack"]
    assert one == ["cache", "ptx.pack", "sm_90.pack"] and other == ["cache", "ptx.pack", "sm_100.pack"]
    assert none == ["cache"]
    # One cache file per variant holds the binaries of all architectures. A second build reuses all of them.
    cached = [pickle.loads(p.read_bytes()) for p in (tmp_path / "cache").iterdir()]
    assert len(cached) == 2 and all([*binary.cubins] == [80, 90, 100] for binary in cached)
    for arch in (80, 90, 100):
        shipped = {e.binary for e in pack.read(PACKS / f"sm_{arch}.pack")[2]}
        assert {binary.cubins[arch] for binary in cached} <= shipped
    ages = {p.name: p.stat().st_ino for p in (tmp_path / "cache").iterdir()}
    output_of(code)
    assert ages == {p.name: p.stat().st_ino for p in (tmp_path / "cache").iterdir()}


TRIED = """
#include <cstdio>
#include "kernels/column_sum.h"
using namespace liger;
using K = kernels::column_sum;
int main() {
  const auto *listed = &runtime::first_fit<K>(64, true), *other = &runtime::first_fit<K>(64, false);
  K::Config candidate = *listed;
  candidate.BLOCK_M = 7;
  runtime::Trial trial{std::string(reinterpret_cast<const char*>(&candidate), sizeof candidate), 0, {}};
  K::kernel.set_trial(&trial);
  const auto& tried = runtime::first_fit<K>(64, true);
  std::printf("%d %u ", tried.BLOCK_M, runtime::variant_index<K>(tried, runtime::point_of<K>(2)) - runtime::kTrialVariant);
  std::printf("%d ", other == &runtime::first_fit<K>(64, false));
  K::kernel.set_trial(nullptr);
  std::printf("%d", listed == &runtime::first_fit<K>(64, true));
}
"""


def test_a_trial_config_overrides_one_of_the_table(tmp_path):
    assert printed_by(TRIED, tmp_path) == "7 2 1 1"


# ---- Constants and names that C++ and kernels share.


def test_flags_and_limits_of_a_kernel_file_reach_cpp():
    found = codegen.constants(tables.modules()["rms_norm"])
    assert found == {"HAS_WEIGHT": 1, "ROUND_FIRST": 2, "SAVE_RSTD": 8, "NEEDS_DWEIGHT": 16, "FINAL": 32}
    assert "constexpr int32_t ROUND_FIRST = 2;" in codegen.header("rms_norm", tables.modules()["rms_norm"])


def test_operators_that_launch_a_kernel_are_found_in_the_cpp_sources():
    launched_by = codegen.operators_of()
    # In the order of the sources, so that the generated headers do not change without a reason.
    stems = [path.stem for path in sorted((codegen.CSRC / "ops").rglob("*.cpp"))]
    for operators in launched_by.values():
        assert operators == sorted(operators, key=stems.index)
    assert {"xielu", "short_conv", "moe_router", "rms_norm", "layer_norm"} <= set(launched_by["column_sum"])
    assert not {"swiglu", "relu_squared", "embedding"} & set(launched_by["column_sum"])
    # Found by includes: a divergence shares code with the linear loss.
    found = ["cross_entropy", "fused_linear_cross_entropy", "fused_linear_divergence"]
    assert launched_by["cross_entropy_fwd"] == found
    assert launched_by["swiglu_fwd"] == ["swiglu"]
    assert all(launched_by.get(kernel.name) for kernel in tables.kernels())
