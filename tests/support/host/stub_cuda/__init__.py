"""Tests of the runtime without a GPU: they run functions in a new process, where libcuda.so.1 is a stub driver."""

from __future__ import annotations

import atexit
import inspect
import json
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import sanitizers
from .packs import ARCHS, PACKS, ROOT, sample  # noqa: F401  tests find it here

LIBRARIES = ROOT / "liger_ops" / "lib"


class Run(NamedTuple):
    value: Any
    log: list[str]  # lines that the runtime logged, without their prefix


@cache
def scratch() -> Path:
    """A temporary folder of this test session, writable only by this user."""
    folder = tempfile.mkdtemp(prefix="liger_ops_stub")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def compile_cpp(name: str, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    target = scratch() / name
    target.parent.mkdir(exist_ok=True)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", *map(str, sources), *flags, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@cache
def driver_folder() -> Path:
    source = Path(__file__).parent / "stub_cuda.cpp"
    return compile_cpp("driver/libcuda.so.1", source, flags=("-shared", "-fPIC", "-fvisibility=hidden")).parent


@cache
def cublas_folder() -> Path:
    source = Path(__file__).parent / "stub_cublas_lt.cpp"
    return compile_cpp("cublas/libcublasLt.so.13", source, flags=("-shared", "-fPIC", "-fvisibility=hidden")).parent


def environment(**changes: Any) -> dict[str, str]:
    """Environment variables that select the stub driver and the test packs, and disable the kernel cache."""
    no_cache = dict.fromkeys(["LIGER_OPS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"], "")
    defaults = {
        "LD_LIBRARY_PATH": driver_folder(),
        "LIGER_OPS_PACK_DIR": PACKS,
        "LIGER_OPS_JIT": "1",
        "LIGER_OPS_LOG": "1",
    }
    return {k: str(v) for k, v in (no_cache | defaults | sanitizers.environment() | changes).items()}


def run(function: Callable, *arguments: Any, needs: Sequence[Callable] = (), **env: Any) -> Run:
    """Calls `function` in a new process and returns its value and log. The process runs the source of `function` and of
    `needs`, the helpers that it calls; both can use the names of stub_cuda.client."""
    from tests.support.checks import run_python

    call = f"{function.__name__}(*json.loads({json.dumps(arguments)!r}))"
    source = "\n".join(textwrap.dedent(inspect.getsource(f)) for f in (*needs, function))
    code = f"from tests.support.host.stub_cuda.client import *\n{source}\nprint('\\n' + json.dumps({call}))"
    done = run_python(code, **environment(**env))
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    lines = [line.removeprefix("liger_ops: ") for line in done.stderr.splitlines() if line.startswith("liger_ops: ")]
    return Run(json.loads(done.stdout.splitlines()[-1]), lines)


def fnv(data: bytes) -> str:
    """The hash that the stub records for a module (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{value:016x}"
