"""Finds and loads the operator library for the installed torch, and warns if there is none."""

from __future__ import annotations

import importlib.metadata
import os
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ..aot import built

LIBRARIES = built.LIBRARIES
PREFIX = "libliger_ops_torch"


class Loaded(NamedTuple):
    library: Path | None  # None: the reference formulas run
    tried: dict[str, str]  # library file -> why it was not used


def torch_minor() -> str:
    return ".".join(re.findall(r"\d+", torch.__version__)[:2])


def candidates() -> Iterator[tuple[Path, str | None]]:
    """(library, reason not to use it or None): first libraries built on this machine, then those of the wheel."""
    local = [path for folder in built.folders() for path in sorted(folder.glob(f"{PREFIX}*-*.so"))]
    exact = built.library_name(torch_minor()) if local else None
    for path in local:
        yield path, None if path.name == exact else "built here from other sources or for another torch"
    for path in sorted({*LIBRARIES.glob(f"{PREFIX}*.so")} - {*local}):
        built_for = path.stem.removeprefix(PREFIX)
        fits = built_for == torch_minor()
        yield path, None if fits else f"built for torch {built_for}, installed is {torch.__version__}"


def shadowed() -> Path | None:
    """The installed package, if this one is a source folder without libraries that Python found first."""
    if any(LIBRARIES.glob(f"{PREFIX}*.so")):
        return None
    for distribution in importlib.metadata.distributions(name="liger-ops"):
        package = Path(str(distribution.locate_file("liger_ops"))).resolve()
        if package != built.PACKAGE and any(package.glob(f"lib/{PREFIX}*.so")):
            return package
    return None


def remedy() -> str:
    here = built.PACKAGE.parent
    if (built.PACKAGE / "metadata.json").exists():  # written by aot/hub.py
        return "Load a revision of the repository that serves this torch"
    commands = f"with `make build` or `pip install --no-build-isolation -e .` in {here}"
    if installed := shadowed():
        return (
            f"The sources in {here} shadow the installed package, {installed}: run Python in another folder, or build "
            f"these sources {commands}"
        )
    if (here / "setup.py").exists() and not any(LIBRARIES.glob(f"{PREFIX}*.so")):
        return f"Build these sources {commands}"
    return "Build a library with `python -m liger_ops build`"


@cache
def load() -> Loaded:
    """Registers torch.ops.liger.*: the operator library if one fits this torch, else the reference formulas."""
    if os.environ.get("LIGER_OPS_LIBRARY") == "0":
        return load_reference({"every library": "LIGER_OPS_LIBRARY=0"})
    tried: dict[str, str] = {}
    for path, misfit in candidates():
        if misfit:
            tried[path.name] = misfit
            continue
        try:
            torch.ops.load_library(path)
            return Loaded(path, tried)
        except OSError as error:
            tried[path.name] = f"did not load: {error}"
    reasons = "; ".join(f"{name} {why}" for name, why in tried.items()) or f"there is none in {LIBRARIES}"
    warnings.warn(
        f"liger_ops: no operator library fits torch {torch.__version__} ({reasons}). Plain PyTorch formulas run "
        f"instead: they are slower and need more memory. {remedy()}",
        RuntimeWarning,
        stacklevel=3,
    )
    return load_reference(tried)


def load_reference(tried: dict[str, str]) -> Loaded:
    from ..reference import _register

    _register.register()
    return Loaded(None, tried)
