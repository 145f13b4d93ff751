"""When results of Triton's interpreter are computed anew."""

import shutil
from importlib.metadata import version

import interpreted
import pytest
from checks import ROOT

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
