"""Finds the operator library built for the installed torch, and says what happened when there is none."""

from __future__ import annotations

import os
import re
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

LIBRARIES = Path(__file__).parent / "lib"
PREFIX = "libliger_ops_torch"


class Loaded(NamedTuple):
    library: Path | None  # None: the operators are their reference formulas
    tried: dict[str, str]  # library file -> why it was not used


def torch_minor() -> str:
    return ".".join(re.match(r"(\d+)\.(\d+)", torch.__version__).groups())


@cache
def load() -> Loaded:
    """Registers torch.ops.liger.*: the operator library if one fits this torch, else the reference formulas."""
    if os.environ.get("LIGER_OPS_LIBRARY") == "0":
        return load_reference({"every library": "LIGER_OPS_LIBRARY=0"})
    tried: dict[str, str] = {}
    for path in sorted(LIBRARIES.glob(f"{PREFIX}*.so")):
        built_for = path.stem.removeprefix(PREFIX)
        if built_for != torch_minor():
            tried[path.name] = f"built for torch {built_for}, installed is {torch.__version__}"
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
