"""Operator libraries that `python -m liger_ops build` made: where they lie, from what, and which of them fits.

A library's name ends in a stamp of what it depends on, so that none is loaded that was built for another torch (two
nightlies of one minor differ) or from other sources, and several lie side by side.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from .._version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = PACKAGE / "lib"
SHIPPED = PACKAGE / "share" / "src"


def user_folder() -> Path:
    """For libraries, where the package's own folder cannot be written."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("LIGER_OPS_LIBRARY_DIR") or os.path.join(cache, "liger_ops", "lib"))


def folders() -> list[Path]:
    """Where libraries may lie. LIGER_OPS_LIBRARY_DIR comes first, because it was asked for."""
    found = [LIBRARIES, user_folder()]
    return found[::-1] if os.environ.get("LIGER_OPS_LIBRARY_DIR") else found


def source_folders() -> list[Path]:
    """csrc and the generated headers: those that the wheel brought, else the checkout's, last generated."""
    if SHIPPED.exists():
        return [SHIPPED / "csrc", SHIPPED / "generated"]
    build = PACKAGE.parent / "build"
    stamps = [*build.glob("*/generated/stamp"), *build.glob("*/release/generated/stamp")]
    newest = max(stamps, key=lambda path: path.stat().st_mtime, default=build / "generated" / "stamp")
    return [PACKAGE.parent / "csrc", newest.parent]


def stamp() -> str:
    """Of the torch at hand and of the sources. The library finds the runtime by its path."""
    facts = [__version__, torch.__version__, str(torch.version.git_version), str(PACKAGE)]
    digest = hashlib.sha256("\n".join(facts).encode())
    for folder in source_folders():
        for path in sorted(folder.rglob("*.h")) + sorted(folder.rglob("*.cpp")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def library_name(minor: str) -> str:
    return f"libliger_ops_torch{minor}-{stamp()}.so"
