"""Layering: includes point to lower layers without cycles, and the runtime uses neither torch nor Python."""

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.checks import output_of
from tests.support.host.stub_cuda import LIBRARIES, ROOT

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
        assert len(path.parts) >= 3, f"{path} belongs to no family"
        family = path.parts[1]
        others = [name for name in ours(CSRC / path) if name.startswith("ops/") and Path(name).parts[1] != family]
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
    assert order.index("runtime/driver") < order.index("runtime/launch") < order.index("ops/linear/mm")


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


def module_of(path):
    """The parts of its name below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {module_of(path): path for path in PACKAGE.rglob("*.py")}


def imports_of(module):
    """Modules of the package that one imports, anywhere in its file."""
    path = MODULES[module]
    here = module if path.name == "__init__.py" else module[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = ["liger_ops", *here][: len(here) + 2 - node.level] if node.level else []
            origin = [*parent, *(node.module.split(".") if node.module else [])]
            names = [[*origin, alias.name] for alias in node.names]
        else:
            continue
        for package, *parts in names:
            if package == "liger_ops":
                # What is no module is a member of one.
                yield tuple(parts) if tuple(parts) in MODULES else tuple(parts[:-1])


def test_python_imports_point_downwards():
    graph = {}
    for module in MODULES:
        part = "".join(module[:1])
        graph.setdefault(part, set()).update({"".join(name[:1]) for name in imports_of(module)} - {part})
    list(TopologicalSorter(graph).static_order())  # fails on a cycle
    assert not graph["kernels"] and not graph["reference"]
    assert graph["aot"] == {"kernels", "reference", "_version"}
    assert graph["functional"] == {"reference", "_declared"}


def test_python_files_import_each_other_in_no_circle():
    """Whether at the top of a file or in a function, and a package's own file too."""
    graph = {module: {*imports_of(module)} - {module} for module in MODULES}
    # Patching still has one, in which every file of transformers/ stands.
    whole = {module: {n for n in names if n[:1] != ("transformers",)} for module, names in graph.items()}
    list(TopologicalSorter(whole).static_order())


def test_kernels_import_no_torch():
    code = "from tests.support.host.stub_cuda.client import *; tables().kernels(); import liger_ops.aot.compile, liger_ops.aot.codegen"
    assert output_of(code + "; print('torch' in sys.modules)") == "False\n"
