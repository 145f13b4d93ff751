"""Providers: how they are loaded, and a check of the path that ours took."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.op import Absent, Op

# Measured for every op; an op may add providers.
COMMON = ("torch", "hf", "torch.compile", "liger-kernel", "quack", "ours")
PROVIDERS = (
    "GEMMs", "three GEMMs", "four GEMMs", "six GEMMs", "GEMMs of a frozen head", "GEMMs of ours", "GEMMs of compact",
    "frozen", "frozen head", "copy", *COMMON[:4], "liger-kernel JSD", "liger-sm90", "torchao", "torchao rows_hp", "torchao tensor", "fla", "causal_conv1d", "cut-cross-entropy", "trl", "trl JSD", "trl frozen", *COMMON[4:],
    "ours JIT", "ours compact", "ours 16 chunks", "ours 64 MiB", "ours 320 MiB", "ours eager", "ours linear",
    "ours two", "ours with entropy", "ours as a loss", "ours JSD", "ours per token", "ours per token 1280 MiB",
    "ours frozen", "ours rows_hp", "ours one by one", "ours tensor", "ours blocks", "ours 128x128",
)  # fmt: skip
# Do only a part of the work.
PARTS = (
    "GEMMs", "three GEMMs", "four GEMMs", "six GEMMs", "GEMMs of a frozen head", "GEMMs of ours", "GEMMs of compact",
    "frozen", "frozen head", "copy",
)  # fmt: skip
PACKAGES = (
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "flash-linear-attention",
    "transformers",
    "trl",
    "torchao",
)
# Without a GPU, compilation takes longer than the rest of a quick run.
DEFAULT_PROVIDERS = {("quick", "cpu"): tuple(p for p in PROVIDERS if p != "torch.compile")}


def module_of(stem: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{stem}")


def operator_of(name: str) -> Callable[[], Callable[..., Any]]:
    """The provider that is our operator."""

    def load() -> Callable[..., Any]:
        import liger_ops  # noqa: F401

        return getattr(torch.ops.liger, name).default

    return load


def op_of(stem: str) -> Op:
    """Of a file of this folder."""
    op = module_of(stem).OP
    return replace(op, providers={"ours": operator_of(stem), **op.providers})


def discover() -> dict[str, Op]:
    """The ops of this folder: every file that defines OP, by its name."""
    stems = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("__"))
    return {stem: op_of(stem) for stem in stems if hasattr(module_of(stem), "OP")}


def is_ours(name: str) -> bool:
    return name.split()[0] == "ours"


def concerns(op: Op, name: str) -> bool:
    return name in COMMON or name in op.providers


def load(op: Op, name: str) -> Callable[..., Any]:
    """The provider's callable. Raises Absent, or any error of the provider."""
    if name == "hf":
        return op.formula
    if name == "torch.compile":
        torch._dynamo.reset()  # every case gets kernels for its own sizes
        return torch.compile(op.formula, dynamic=False)
    if name not in op.providers:
        raise Absent("has no such op")
    try:
        return op.providers[name]()
    except ModuleNotFoundError as error:
        raise Absent(f"not installed (no module {error.name})") from error


class PathWitness:
    """Reads from the library's launch counts which of its paths ran since the last look."""

    def __init__(self, provider: str, device: str) -> None:
        self.active = is_ours(provider)
        self.expected = ("cpu",) if device == "cpu" else ("aot", "jit", "ptx")
        self.counts = self.read()

    def read(self) -> dict[str, int]:
        if not self.active:
            return {}
        import liger_ops

        return dict(liger_ops.launch_counts())

    def look(self) -> str:
        before, self.counts = self.counts, self.read()
        ran = sorted(path for path, count in self.counts.items() if count > before.get(path, 0))
        if self.active and not ran:
            raise RuntimeError("launch_counts() did not change: the path that ran is unknown")
        if unexpected := set(ran) - set(self.expected):
            raise RuntimeError(f"took the path {', '.join(unexpected)} (expected {' or '.join(self.expected)})")
        return "+".join(ran)


def reason(error: BaseException) -> str:
    """An error as one line for a page, without paths of the machine and terminal colors."""
    if isinstance(error, Absent):
        return str(error)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines() or [""]
    return re.sub(r"(/[\w.+-]+){2,}", "…", f"crashed: {type(error).__name__}: {lines[0]}")[:200]
