"""`python -m liger_ops`, and the page of environment variables."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

import liger_ops
from liger_ops import __main__ as main
from liger_ops.doctor import installation as command
from tests.support.checks import output_of
from tests.support.host import stub_cuda
from tests.support.host.stub_cuda import PACKS, ROOT


def run_module(*arguments, **env):
    environment = {**os.environ, **stub_cuda.environment(**env), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


DEVICES = "9.0:132:Stub H200;8.7:16:Stub Orin;7.5:40:Stub T4"


@pytest.fixture(scope="module")
def facts():
    """The JSON report for three devices, with Triton installed."""
    return json.loads(run_module("liger_ops", "--json", STUB_CUDA_DEVICES=DEVICES).stdout)


def test_a_reader_that_leaves_early():
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command_line = [sys.executable, "-m", "liger_ops"]
    done = subprocess.run(command_line, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "arguments, status, said",
    [
        (["--version"], 0, f"liger-ops {liger_ops.__version__}, torch {torch.__version__}\n"),
        (["docter"], 2, "COMMAND must be one of build, doctor, run, and come first (got docter)\n"),
        (["--json", "doctor"], 2, "COMMAND must be one of build, doctor, run, and come first (got doctor)\n"),
        (["--help"], 0, "build, doctor, run"),
    ],
)
def test_commands_are_named(arguments, status, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["liger_ops", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    printed = capsys.readouterr()
    assert end.value.code == status and said in printed.out + printed.err


def test_json_reports_the_installation(facts):
    assert (facts["version"], facts["torch"]) == (liger_ops.__version__, torch.__version__)
    assert facts["library"] == str(liger_ops._loaded.library)
    assert [(d["index"], d["name"], d["capability"]) for d in facts["devices"]] == [
        (0, "Stub H200", 90), (1, "Stub Orin", 87), (2, "Stub T4", 75),
    ]  # fmt: skip
    files = {p["file"]: p for p in facts["packs"]["files"]}
    assert set(files) == {str(path) for path in PACKS.glob("*.pack")}
    assert all(p["kernels"] > 0 and p["bytes"] < 6e6 for p in files.values())
    assert facts["jit"]["state"].startswith("triton-") and facts["jit"]["kernels"] == 0


def test_json_reports_the_path_of_each_operator_on_each_device(facts):
    assert {"rms_norm", "fused_add_rms_norm", "layer_norm"} <= facts["operators"].keys()
    for paths in facts["operators"].values():
        assert paths == {"cpu": "cpu", "cuda:0": "aot", "cuda:1": "jit", "cuda:2": "jit"}


def test_text_is_aligned_and_short(tmp_path):
    packs = tmp_path / "packs"
    packs.mkdir()
    shutil.copy(PACKS / "ptx.pack", packs)
    (packs / "sm_90.pack").write_bytes(b"")
    done = run_module("liger_ops", STUB_CUDA_DEVICES=DEVICES, LIGER_OPS_PACK_DIR=packs, LIGER_OPS_JIT="0")
    lines = done.stdout.splitlines()
    assert f"kernel pack ignored: {packs}/sm_90.pack: empty file" in done.stderr
    assert lines[0] == f"liger-ops {liger_ops.__version__}"
    assert "JIT       off: LIGER_OPS_JIT=0" in lines
    head = next(i for i, line in enumerate(lines) if line.startswith("operator"))
    assert lines[head].split() == ["operator", "cpu", "cuda:0", "cuda:1", "cuda:2"]
    for line in lines[head + 1 :]:
        assert line.split()[1:] == ["cpu", "ptx", "ptx", "none"]
        assert [m.start() for m in re.finditer(r"\S+", line)] == [m.start() for m in re.finditer(r"\S+", lines[head])]
    assert len(lines) < 20 + len(liger_ops.reference.operators()) and all(len(line) <= 120 for line in lines)


def test_cached_kernels_are_counted(tmp_path):
    folder = tmp_path / "triton-3.6.0"
    folder.mkdir()
    (folder / "one.pack").write_bytes(bytes(1000))
    assert command.cached_kernels(str(tmp_path)) == {"kernels": 1, "bytes": 1000}
    assert command.cached_kernels("") == {"kernels": 0, "bytes": 0}


WITHOUT_LIBRARY = """
import warnings, torch
torch.__version__ = "2.99.0"
warnings.simplefilter("ignore")
from liger_ops.doctor import installation as command
from liger_ops.aot import declarations
print("\\n".join(command.lines(command.report())))
"""


def test_without_a_library_the_report_lists_those_tried():
    done = output_of(WITHOUT_LIBRARY, **stub_cuda.environment(STUB_CUDA_DEVICES=DEVICES))
    assert "library   none: the operators are their reference formulas\n" in done
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"not used: libliger_ops_torch{minor}.so: built for torch {minor}, installed is 2.99.0" in done
    assert re.search(r"^rms_norm +reference$", done, re.M) and "JIT       off: no operator library" in done, done


def test_a_page_names_every_environment_variable():
    sources = [*ROOT.glob("csrc/**/*.[ch]*"), *ROOT.glob("liger_ops/**/*.py"), ROOT / "setup.py"]
    used = {v for path in sources for v in re.findall(r"\bLIGER_OPS_[A-Z_]+\b", path.read_text())}
    page = (ROOT / "docs/environment-variables.md").read_text()
    assert used and all(f"`{v}" in page for v in used), used
