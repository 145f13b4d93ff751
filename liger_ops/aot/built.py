"""Operator libraries built by `python -m liger_ops build`: their folders, their sources, and the name that fits.

A library's name ends in a hash of its inputs. So a library built for another torch (two nightlies of one minor differ)
or from other sources is never loaded, and several libraries can share a folder.
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
    """The folder for libraries if the package's own folder is not writable."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("LIGER_OPS_LIBRARY_DIR") or os.path.join(cache, "liger_ops", "lib"))


def folders() -> list[Path]:
    """The folders to search. LIGER_OPS_LIBRARY_DIR, if set, comes first."""
    found = [LIBRARIES, user_folder()]
    return found[::-1] if os.environ.get("LIGER_OPS_LIBRARY_DIR") else found


def source_folders() -> list[Path]:
    """csrc and the generated headers: from the wheel, else from the checkout's newest build."""
    if SHIPPED.exists():
        return [SHIPPED / "csrc", SHIPPED / "generated"]
    build = PACKAGE.parent / "build"
    stamps = [*build.glob("*/generated/stamp"), *build.glob("*/release-*/generated/stamp")]
    newest = max(stamps, key=lambda path: path.stat().st_mtime, default=build / "generated" / "stamp")
    return [PACKAGE.parent / "csrc", newest.parent]


def stamp() -> str:
    """Hash of the installed torch, of the sources, and of the package's path, where the library finds the runtime."""
    facts = [__version__, torch.__version__, str(torch.version.git_version), str(PACKAGE)]
    digest = hashlib.sha256("\n".join(facts).encode())
    for folder in source_folders():
        for path in sorted(folder.rglob("*.h")) + sorted(folder.rglob("*.cpp")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def library_name(minor: str) -> str:
    return f"libliger_ops_torch{minor}-{stamp()}.so"
