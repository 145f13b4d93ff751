"""Triton kernels and their variant tables: one file per operator, in the folder of its family, found by globbing. The
files next to the folders are shared code."""

from functools import cache
from importlib import import_module
from pathlib import Path

from .table import Config, Kernel, Variant

__all__ = ["Config", "Kernel", "Variant", "modules", "kernels", "find"]


@cache
def modules() -> dict[str, list[Kernel]]:
    """Stem of every kernel file -> the kernels that the file declares, in order."""
    paths = sorted(Path(__file__).parent.glob("*/[!_]*.py"), key=lambda path: path.stem)
    return {p.stem: list(import_module(f".{p.parent.name}.{p.stem}", __package__).KERNELS) for p in paths}


def kernels() -> list[Kernel]:
    return [k for ks in modules().values() for k in ks]


def find(name: str) -> Kernel:
    return next(k for k in kernels() if k.name == name)
