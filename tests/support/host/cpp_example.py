"""The programs of examples/cpp."""

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import liger_ops
from tests.support.host.stub_cuda import scratch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "cpp"


def run(*command: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def configure_cpp(source: Path, target: Path) -> subprocess.CompletedProcess:
    """Runs CMake on a project that finds torch and this package."""
    prefixes = f"{torch.utils.cmake_prefix_path};{Path(liger_ops.__file__).parent}"
    command = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(target), f"-DCMAKE_PREFIX_PATH={prefixes}"]
    return subprocess.run(command, capture_output=True, text=True)


@cache
def cpp_program(name: str) -> Path:
    """Builds a program of examples/cpp once and returns its path."""
    folder = scratch() / "cpp"
    done = configure_cpp(EXAMPLE, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    run("cmake", "--build", folder, "--target", name)
    return folder / name


def libraries_of(program: Path) -> set[str]:
    """Names, without versions, of the shared libraries that a program loads at startup."""
    return {line.split()[0].split(".so")[0] for line in run("ldd", program).splitlines()}


def example() -> ModuleType:
    """The model of examples/cpp."""
    path = EXAMPLE / "model.py"
    spec = importlib.util.spec_from_file_location("example_model", path)
    module = importlib.util.module_from_spec(spec)
    # torch.export in strict mode looks the module up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
