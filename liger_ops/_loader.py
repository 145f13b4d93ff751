"""Finds the operator library built for the installed torch, and says what happened when there is none."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .aot import built

LIBRARIES = built.LIBRARIES
PREFIX = "libliger_ops_torch"


class Loaded(NamedTuple):
    library: Path | None  # None: the operators are their reference formulas
    tried: dict[str, str]  # library file -> why it was not used


def torch_minor() -> str:
    return ".".join(re.findall(r"\d+", torch.__version__)[:2])


def candidates() -> Iterator[tuple[Path, str | None]]:
    """Operator libraries, and what is against each: first those that were built here, then those of the wheel."""
    here = [path for folder in built.folders() for path in sorted(folder.glob(f"{PREFIX}*-*.so"))]
    exact = built.library_name(torch_minor()) if here else None
    for path in here:
        yield path, None if path.name == exact else "built here from other sources or for another torch"
    for path in sorted({*LIBRARIES.glob(f"{PREFIX}*.so")} - {*here}):
        built_for = path.stem.removeprefix(PREFIX)
        fits = built_for == torch_minor()
        yield path, None if fits else f"built for torch {built_for}, installed is {torch.__version__}"


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
        f"liger_ops: no operator library fits torch {torch.__version__} ({reasons}), so plain PyTorch formulas run in its "
        "place, more slowly and with more memory: build one with `python -m liger_ops build`",
        RuntimeWarning,
        stacklevel=3,
    )
    return load_reference(tried)


def load_reference(tried: dict[str, str]) -> Loaded:
    from .reference import _register

    _register.register()
    return Loaded(None, tried)
