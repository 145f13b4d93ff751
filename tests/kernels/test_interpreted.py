"""When results of Triton's interpreter are computed anew."""

import shutil
from importlib.metadata import version

import interpreted
import pytest
from checks import ROOT, run_python

CODE = """
import numpy
import liger_ops.kernels.activations.relu_squared

def run(path, n):
    numpy.savez(path, n=n)
"""
ELEMENTS = "liger_ops/kernels/elements.py"


@pytest.fixture
def tree(tmp_path):
    for folder in ("liger_ops/kernels", "tests/support"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=lambda _, names: {"__pycache__"} & set(names))
    return tmp_path


def test_sources(tree):
    names = {str(path.relative_to(tree)) for path in interpreted.sources(CODE, tree)}
    shared = {f"liger_ops/kernels/{name}.py" for name in ("__init__", "table", "hopper", "elements", "rows")}
    own = {f"liger_ops/kernels/activations/{name}.py" for name in ("__init__", "relu_squared")}
    assert names == shared | own | {"tests/support/interpreter.py"}
    of_moe = interpreted.sources("from moe_on_interpreter import layer", tree)
    assert {tree / "tests/support/moe_on_interpreter.py", tree / "liger_ops/kernels/moe/_tiles.py"} <= set(of_moe)


@pytest.mark.parametrize("file", ["activations/relu_squared.py", "elements.py", "table.py", "__init__.py"])
def test_a_changed_source_changes_the_hash(file, tree):
    digest = interpreted.digest.__wrapped__
    before = digest(CODE, tree)
    assert before == digest(CODE)
    (tree / "liger_ops/kernels/losses/log_probs.py").write_text("raise NotImplementedError\n")
    assert digest(CODE, tree) == before
    path = tree / "liger_ops/kernels" / file
    path.write_text(path.read_text() + "#\n")
    assert digest(CODE, tree) != before


def test_the_interpreter_the_code_and_versions_change_the_hash(tree, monkeypatch):
    digest = interpreted.digest.__wrapped__
    found = {digest(CODE, tree), digest(CODE + "#", tree)}
    for name in ("triton", "numpy", "torch"):
        with monkeypatch.context() as m:
            m.setattr(interpreted, "version", lambda of: "0" if of == name else version(of))
            found.add(digest(CODE, tree))
    with (tree / "tests/support/interpreter.py").open("a") as file:
        file.write("#\n")
    found.add(digest(CODE, tree))
    assert len(found) == 6


def test_results_are_kept_until_the_code_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreted, "FOLDER", tmp_path)
    for code in (CODE, CODE + "#"):
        assert interpreted.load("group", code, (3,), [(3,), (4,)])["n"] == 3
        (folder,) = (tmp_path / "group").iterdir()
        assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(interpreted, "run_python", None)
    assert interpreted.load("group", code, (4,), [(4,)])["n"] == 4


def test_an_import_outside_the_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(interpreted, "FOLDER", tmp_path)
    code = CODE + "\n__import__('liger_ops.kernels.rope.rope')\n"
    with pytest.raises(AssertionError, match="the hash of the sources lacks .*rope.py"):
        interpreted.load("group", code, (3,), [(3,)])


BESIDE = """
import torch, triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

@triton.jit
def copy(out, x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)

def launch(outs, xs, n):
    try:
        copy[(1,)](torch.zeros(outs), torch.ones(xs), n, BLOCK=16)
    except InterpreterError as error:
        return str(error)

assert launch(9, 9, 9) is None
# The lane of 16 bytes that holds the last element may be read whole.
assert launch(9, 6, 8) is None
assert "read of 4 bytes outside" in launch(9, 6, 9)
assert "write of 4 bytes outside of the launch's tensors: 36 bytes from the start of 36" in launch(9, 12, 10)
assert "outside" in launch(0, 9, 1)
"""


def test_accesses_outside_of_tensors_are_errors(tmp_path):
    (tmp_path / "beside.py").write_text(BESIDE)  # Triton reads the source
    done = run_python(f"import runpy\nrunpy.run_path({str(tmp_path / 'beside.py')!r})", TRITON_INTERPRET="1")
    assert not done.returncode, done.stderr
