"""Triton kernels and their variant tables: one file an operator, found by globbing this folder."""

from importlib import import_module
from pathlib import Path

from .table import Config, Kernel, Variant

__all__ = ["Config", "Kernel", "Variant", "modules", "kernels", "find"]


def modules() -> dict[str, list[Kernel]]:
    """Stem of every kernel file -> the kernels that it declares, in file order."""
    shared = ("__init__", "hopper", "kept", "rows", "streamed", "table")
    stems = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in shared)
    return {s: list(import_module(f".{s}", __package__).KERNELS) for s in stems}


def kernels() -> list[Kernel]:
    return [k for ks in modules().values() for k in ks]


def find(name: str) -> Kernel:
    return next(k for k in kernels() if k.name == name)
