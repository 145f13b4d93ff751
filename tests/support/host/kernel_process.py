"""Runs tests in a process in which operators call their CUDA code for tensors of the CPU, and Triton's interpreter runs the
kernels. So the host is tested as it is, without a GPU. A test runs there if its argument `device` is "interpreted"."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import subprocess
import sys
import traceback
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

SUPPORT = Path(__file__).parent


class Process:
    def __init__(self) -> None:
        from tests.support.checks import environment_of_tree

        self.connection, theirs = Pipe()
        environment = environment_of_tree(TRITON_INTERPRET="1", LIGER_OPS_INTERPRET="1")
        command = [sys.executable, __file__, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        atexit.register(self.connection.close)

    def ask(self, **request: Any) -> Any:
        """The answer. An exception there is one here, with its traceback as text."""
        try:
            self.connection.send(request)
            answer, error = self.connection.recv()
        except (BrokenPipeError, ConnectionResetError, EOFError):
            started.cache_clear()
            raise AssertionError(f"the interpreter's process ended: {self.process.wait()}") from None
        assert not error, error
        return answer


@cache
def started(rank: int = 0) -> Process:
    """One of several processes, if tests need a group."""
    return Process()


# Of tests that ask themselves.
SETTINGS = dict(capability=80, seed=0, threads=1, onednn=True)


# ---- In that process


class Pointer:
    def __init__(self, address: int, dtype: Any) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


@cache
def tracker() -> ctypes.CDLL:
    """Built once, in build/."""
    import torch

    from tests.support.checks import ROOT

    source, library = SUPPORT / "tracked_memory.cpp", ROOT / "build" / f"tracked_memory-{torch.__version__}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        folder, made = Path(torch.__file__).parent, library.with_suffix(f".{id(source)}")
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{folder / 'include'}", source, "-o", made]
        subprocess.run([*map(str, command), f"-L{folder / 'lib'}", "-lc10"], check=True)
        made.rename(library)
    found = ctypes.CDLL(str(library))
    found.memory_of.restype = ctypes.c_size_t
    found.memory_of.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t)]
    return found


def span_of(address: int) -> tuple[int, int]:
    first = ctypes.c_size_t()
    size = tracker().memory_of(address, ctypes.byref(first))
    return first.value, first.value + size


launched: list[str] = []  # names of the variants


def kernels_launched() -> set[str]:
    return {name.partition("[")[0] for name in launched}


def run_kernel(name: str, index: int, grid: tuple[int, int, int], arguments: int) -> None:
    import torch

    import liger_ops.kernels as tables
    from tests.support.host import interpreter

    dtypes = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    dtypes |= {"i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}
    kernel = tables.find(name)
    assert kernel.has_variant(index), f"{name} has no variant {index}"
    variant = kernel.variant(index)
    values: list[Any] = []
    spans = []
    for argument, kind, offset, size in kernel.layout:
        raw = ctypes.string_at(arguments + offset, size)
        number = int.from_bytes(raw, "little", signed=kind[0] != "*")
        if variant.config.aligned and argument in kernel.aligned:
            assert number % (16 if kind[0] == "*" else 8) == 0, f"{variant.name}: {argument} is {number}"
        if kind[0] != "*":
            values.append(ctypes.c_float.from_buffer_copy(raw).value if kind == "fp32" else number)
        elif not argument.endswith("_scratch"):
            values.append(Pointer(number, dtypes[variant.choices.get(kind[1:], kind[1:])]))
            spans += [span_of(number)] if number else []
    launched.append(variant.name)
    interpreter.memory.hold_spans(spans)
    # It has no instruction that converts to e4m3.
    constexprs = {name: 0 if name == "HARDWARE" else value for name, value in variant.constexprs.items()}
    interpreter.launch(kernel.function, grid, values, constexprs)


def imitate(capability: int, multiprocessors: int) -> None:
    """What operators believe the device to be, until the next test."""
    runtime().interpret(run_kernel, capability, multiprocessors)


@cache
def module_at(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def answer_to(
    path: str, function: str, arguments: dict[str, Any], capability: int, seed: int, threads: int, onednn: bool
) -> list[str]:
    """Calls a function of a test's module. Returns the names of the variants that were launched."""
    import torch

    imitate(capability, 1)
    launched.clear()
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.set_flags(onednn)
    getattr(module_at(path), function)(**arguments)
    return launched


@cache
def runtime() -> ModuleType:
    from liger_ops.aot.built import LIBRARIES

    sys.path.insert(0, str(LIBRARIES))
    return importlib.import_module("_runtime")


def serve(connection: Connection) -> None:
    import torch

    from tests.support.host import interpreter

    interpreter.install()
    tracker().track_memory()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer = answer_to(**request), ""
        except BaseException:
            answer = None, traceback.format_exc()
        connection.send(answer)


if __name__ == "__main__":
    sys.modules["tests.support.host.kernel_process"] = sys.modules["__main__"]
    serve(Connection(int(sys.argv[1])))
