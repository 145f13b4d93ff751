"""The sanitizers of tests/sanitize.py, which sets LIGER_OPS_TEST_SANITIZER to one of them."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .packs import ROOT


class Kind(NamedTuple):
    flag: str  # for -fsanitize
    library: str
    variable: str
    options: str


KINDS = {
    # Python does not free everything at exit.
    "address": Kind("address,undefined", "libasan.so", "ASAN_OPTIONS", "detect_leaks=0"),
    "thread": Kind("thread", "libtsan.so", "TSAN_OPTIONS", "exitcode=66"),
}


def folder_of(kind: str) -> Path:
    return ROOT / "build" / "sanitizers" / kind


def chosen() -> str | None:
    return os.environ.get("LIGER_OPS_TEST_SANITIZER")


def path_of(library: str) -> str:
    command = ["g++", f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@cache
def environment() -> dict[str, str]:
    """Environment variables for the process that loads the runtime: Python itself is not built with the sanitizer."""
    kind = chosen()
    if kind is None:
        return {}
    _, library, variable, options = KINDS[kind]
    # The sanitizer must find the function that throws when it starts.
    preloaded = " ".join(path_of(name) for name in (library, "libstdc++.so.6"))
    suppressions = Path(__file__).with_name(f"{kind}_sanitizer.txt")
    if suppressions.exists():
        options += f":suppressions={suppressions}"
    return {"LD_PRELOAD": preloaded, variable: options}
