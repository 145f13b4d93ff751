"""Results of kernels in Triton's interpreter, kept in build/interpreted until something that they depend on changes."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import ROOT, run_python
from torch import Tensor

FOLDER = ROOT / "build" / "interpreted"
Name = tuple[str, ...]  # of a module, split at its dots


def cases(quick: Sequence[tuple], thorough: Sequence[tuple] = ()) -> pytest.MarkDecorator:
    """`parametrize` for tests that use the fixture `interpreted`. thorough: may repeat quick cases."""
    rest = [pytest.param(case, marks=pytest.mark.thorough) for case in dict.fromkeys(thorough) if case not in quick]
    return pytest.mark.parametrize("case", [*quick, *rest], ids=lambda case: "-".join(map(str, case)))


def load(group: str, code: str, case: tuple, wanted: Iterable[tuple]) -> dict[str, Tensor]:
    """The arrays that run(path, *case) of `code` saves at `path`. A missing result is computed together with all that
    are wanted, in one process, because starting it takes most of the time. group: whose stale results are deleted."""
    folder = FOLDER / group / digest(code)
    if not entry(folder, case).exists():
        error = compute(code, folder, tuple(c for c in dict.fromkeys(wanted) if not entry(folder, c).exists()))
        assert not error, error
        for stale in set(folder.parent.iterdir()) - {folder}:
            shutil.rmtree(stale, ignore_errors=True)
    with np.load(entry(folder, case)) as arrays:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def entry(folder: Path, case: tuple) -> Path:
    return folder / f"{sha256(repr(case))}.npz"


@cache
def compute(code: str, folder: Path, cases: Iterable[tuple]) -> str:
    """Returns what went wrong, once for all tests that need these results."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        made = {case: Path(scratch, entry(folder, case).name) for case in cases}
        calls = [f"run({str(path)!r}, *{case!r})" for case, path in made.items()]
        done = run_python("\n".join([code, *calls, PRINT_FILES]), TRITON_INTERPRET="1")
        if done.returncode:
            return done.stdout + done.stderr
        imported = map(Path, done.stdout.split(HEADING)[-1].splitlines())
        unknown = set(filter(is_own, imported)) - set(sources(code))
        if unknown:
            return f"the hash of the sources lacks {sorted(map(str, unknown))}"
        for case, path in made.items():
            os.replace(path, entry(folder, case))  # other processes see no half result
    return ""


HEADING = "files of imported modules:\n"
PRINT_FILES = f"""
import sys
print({HEADING!r}, *(m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)), sep="\\n")
"""


def is_own(path: Path) -> bool:
    return any(folder in path.parents for folder in (ROOT / "liger_ops", ROOT / "tests"))


@cache
def digest(code: str, root: Path = ROOT) -> str:
    """Hash of everything that determines the results: the code, what it imports from this tree, and versions."""
    texts = [path.read_text() for path in sources(code, root)]
    versions = [platform.python_version(), *map(version, ("triton", "numpy", "torch"))]
    return sha256(repr([code, texts, versions]))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sources(code: str, root: Path = ROOT) -> list[Path]:
    """Files of this tree that the code imports, directly or not."""
    found: set[Path] = set()
    pending: list[Name] = [("interpreter",), *imported(code, ())]
    while pending:
        name = pending.pop()
        # A module's name is preceded by its packages. interpreter.py replaces liger_ops itself by an empty one.
        for i in range(2 if name[:1] == ("liger_ops",) else 1, len(name) + 1):
            base = root if name[0] == "liger_ops" else root / "tests" / "support"
            stem = base.joinpath(*name[:i])
            path, package = (
                (stem / "__init__.py", name[:i]) if stem.is_dir() else (stem.with_suffix(".py"), name[: i - 1])
            )
            if path.is_file() and path not in found:
                found.add(path)
                pending += imported(path.read_text(), package)
    return sorted(found)


def imported(source: str, package: Name) -> Iterator[Name]:
    """Modules that the source may import, because what is imported from a package may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield from ((*module, alias.name) for alias in node.names)
