"""Names for functions that stub_cuda.run calls: the torch-free runtime and the stub driver's record."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import threading
import types
import zlib
from pathlib import Path
from typing import Any

from . import LIBRARIES, ROOT, sanitizers

__all__ = [
    "Path", "calls", "call_hook_with", "driver", "json", "launch", "os", "refusal", "runtime", "served_by",
    "sys", "tables", "threading", "zlib",
]  # fmt: skip

sys.path.insert(0, str(sanitizers.folder_of(kind) if (kind := sanitizers.chosen()) else LIBRARIES))
runtime = importlib.import_module("_runtime")


class Driver:
    """The stub's control functions. Opens the library at first use, because the runtime must load it first."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(ctypes.CDLL("libcuda.so.1"), f"stub_{name}")
        if name == "record":
            function.restype = ctypes.c_char_p
        return function


driver = Driver()


def calls(name: str) -> list[dict[str, str]]:
    """The recorded key=value pairs of every call with this name."""
    lines = [line.split() for line in driver.record().decode().splitlines()]
    return [dict(fact.split("=", 1) for fact in facts) for call, *facts in lines if call == name]


def launch(
    kernel: str, variant: int = 0, device: int = 0, grid=(1, 1, 1), args: bytes | None = None, stream: int = 0
) -> None:
    """Launches from a new thread, in which no device is current yet."""
    failure: list[Exception] = []

    def body() -> None:
        try:
            packed = bytes(runtime.args_bytes(kernel)) if args is None else args
            runtime.launch(kernel, variant, device, grid, packed, stream)
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


def refusal(kernel: str = "column_sum", **options: Any) -> str:
    """The error message of a launch; empty if it succeeds."""
    try:
        launch(kernel, **options)
    except RuntimeError as error:
        return str(error)
    return ""


def served_by(kernel: str = "column_sum", **options: Any) -> str | None:
    """The source of the kernel that a launch used (aot, jit, ...); None if the launch failed."""
    runtime.reset_counts()
    if refusal(kernel, **options):
        return None
    (source,) = (name for name, count in runtime.launch_counts(kernel).items() if count)
    return source


def tables() -> Any:
    """Imports liger_ops.kernels without liger_ops/__init__.py, which would import torch."""
    package = types.ModuleType("liger_ops")
    package.__path__ = [str(ROOT / "liger_ops")]
    sys.modules["liger_ops"] = package
    return importlib.import_module("liger_ops.kernels")


def call_hook_with(path: str) -> list[tuple[str, int, int]]:
    """Registers a JIT hook that returns this file's bytes. Each request is added to the returned list."""
    asked: list[tuple[str, int, int]] = []

    def hook(kernel: str, variant: int, capability: int) -> bytes:
        asked.append((kernel, variant, capability))
        return Path(path).read_bytes()

    runtime.set_hook(hook)
    runtime.set_compiler("triton-test")
    return asked
