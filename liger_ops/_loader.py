"""Finds the operator library built for the installed torch, and says what happened when there is none."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

LIBRARIES = Path(__file__).parent / "lib"
PREFIX = "libliger_ops_torch"


class Loaded(NamedTuple):
    library: Path | None  # None: the operators are registered from Python
    tried: dict[str, str]  # library file -> why it was not used


def torch_minor() -> str:
    return ".".join(re.findall(r"\d+", torch.__version__)[:2])


def load() -> Loaded:
    """Registers torch.ops.liger.*, from C++ if a library fits this torch, else from Python."""
    if os.environ.get("LIGER_OPS_LIBRARY") == "0":
        return registered_from_python({"every library": "LIGER_OPS_LIBRARY=0"})
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
        f"liger_ops: no operator library fits torch {torch.__version__} ({reasons}). The operators run from Python: same "
        "results, more time per call. Install a liger-ops wheel for this torch, or build one against it with "
        "`pip install --no-build-isolation .`",
        RuntimeWarning,
        stacklevel=3,
    )
    return registered_from_python(tried)


def registered_from_python(tried: dict[str, str]) -> Loaded:
    from . import fallback

    fallback.register()
    return Loaded(None, tried)
