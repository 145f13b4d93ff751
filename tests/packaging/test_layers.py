"""Layering: includes point to lower layers without cycles, and the runtime uses neither torch nor Python."""

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from checks import output_of
from stub_cuda import LIBRARIES, ROOT

CSRC, PACKAGE = ROOT / "csrc", ROOT / "liger_ops"
FILES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp"))
# Lowest layer first. Headers in kernels/ are generated.
FOLDERS = ("runtime", "kernels", "core", "gemm", "ops")


def includes(path):
    return re.findall(r'#include [<"]([^>"]+)[>"]', path.read_text())


def ours(path):
    return [name for name in includes(path) if name.split("/")[0] in FOLDERS]


def stem(path):
    return str(Path(path).with_suffix(""))


def test_files_include_only_their_own_layer_or_lower_ones():
    for path in FILES:
        folder, *inside = path.relative_to(CSRC).parts
        if not inside or folder == "bindings":
            continue
        above = FOLDERS[FOLDERS.index(folder) + 1 :]
        assert not [name for name in ours(path) if name.split("/")[0] in above], path


def test_operator_families_do_not_include_each_other():
    """Code that two families share belongs in a lower layer."""
    files = [path.relative_to(CSRC) for path in FILES if CSRC / "ops" in path.parents]
    assert files
    for path in files:
        assert len(path.parts) == 3, f"{path} belongs to no family"
        others = [name for name in ours(CSRC / path) if name.startswith("ops/") and Path(name).parent != path.parent]
        assert not others, path


def graph():
    """Includes by stem: a header and its source file are one node."""
    found = {}
    for path in FILES:
        node = stem(path.relative_to(CSRC))
        found.setdefault(node, set()).update(stem(name) for name in ours(path) if stem(name) != node)
    return found


def test_includes_form_no_cycle():
    order = list(TopologicalSorter(graph()).static_order())
    assert order.index("runtime/driver") < order.index("runtime/launch") < order.index("ops/gemm/mm")


def runtime_library():
    """The sources of libliger_runtime.so and the files that they include."""
    found = [*(CSRC / "runtime").iterdir(), *(CSRC / "gemm").glob("*.cpp")]
    for path in found:
        found += [CSRC / name for name in ours(path) if CSRC / name not in found]
    return found


@pytest.mark.parametrize("path", [str(p.relative_to(CSRC)) for p in runtime_library()])
def test_the_runtime_includes_neither_torch_nor_python(path):
    for header in includes(CSRC / path):
        assert header.startswith(("runtime/", "gemm/")) or re.fullmatch(r"[a-z_]+(\.h)?|sys/[a-z]+\.h", header), header


def undefined_symbols(library):
    return subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True).stdout


def test_no_shipped_library_needs_python():
    for library in LIBRARIES.glob("lib*.so"):
        assert not re.search(r"\bPy[A-Z_]", undefined_symbols(library)), library.name


def test_the_runtime_links_neither_torch_nor_cuda():
    symbols = undefined_symbols(LIBRARIES / "libliger_runtime.so")
    assert not re.search(r"c10|2at|torch|\bcu[A-Z]", symbols)


def imports_of(path):
    """Modules of the package that a file imports, anywhere in it, as parts below the package."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ["liger_ops", *here][: -node.level] if node.level else []
            names = [".".join([*parent, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1:] for name in names if name.startswith("liger_ops."))


def test_python_imports_point_downwards():
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        graph.setdefault(part, set()).update({name[0] for name in imports_of(path)} - {part})
    list(TopologicalSorter(graph).static_order())  # fails on a cycle
    assert not graph["kernels"] and graph["reference"] == {"_wanted"}
    assert graph["aot"] == {"kernels", "reference", "_version"}
    assert graph["functional"] == {"reference", "_declared", "_wanted"}


def test_kernels_import_no_torch():
    code = "from stub_cuda.client import *; tables().kernels(); import liger_ops.aot.compile, liger_ops.aot.codegen"
    assert output_of(code + "; print('torch' in sys.modules)") == "False\n"
