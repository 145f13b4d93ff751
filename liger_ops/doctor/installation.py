"""What is installed, and the path that each operator takes on each device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import liger_ops

from .._runtime import jit


def operators() -> list[str]:
    """Names of the public operators, as the dispatcher knows them."""
    names = {
        name.removeprefix("liger::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("liger::")
    }
    return sorted(name for name in names if not name.startswith("_"))


def path_of(op: str, kernels: dict[str, str]) -> str:
    """Paths of the kernels whose names begin with the operator's name; if there are none, of all kernels."""
    own = {path for kernel, path in kernels.items() if kernel.startswith(op)}
    return "+".join(sorted(own or set(kernels.values()))) or "none"


def cached_kernels(folder: str) -> dict[str, int]:
    files = list(Path(folder).glob("triton-*/*.pack")) if folder else []
    return {"kernels": len(files), "bytes": sum(f.stat().st_size for f in files)}


def jit_state(status: dict[str, Any]) -> str:
    if liger_ops._loaded.library is None:
        return "off: no operator library"
    if not status["jit_enabled"]:
        return "off: LIGER_OPS_JIT=0"
    return (jit.compiler() if status["jit_compiler"] else None) or "off: Triton is not installed"


def report() -> dict[str, Any]:
    status = liger_ops.status()
    loaded = liger_ops._loaded
    ops = operators()
    devices = [{k: v for k, v in d.items() if k != "paths"} for d in status["devices"]]
    paths = {op: {f"cuda:{d['index']}": path_of(op, d["paths"]) for d in status["devices"]} for op in ops}
    return {
        "version": liger_ops.__version__,
        "torch": torch.__version__,
        "library": str(loaded.library) if loaded.library else None,
        "libraries_not_used": loaded.tried,
        "devices": devices,
        "packs": {"folder": status["pack_directory"], "files": status["packs"]},
        "jit": {"state": jit_state(status), "cache": status["jit_cache"], **cached_kernels(status["jit_cache"])},
        "operators": {op: {"cpu": "cpu" if loaded.library else "reference", **paths[op]} for op in ops},
    }


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def section(title: str, body: Sequence[str]) -> list[str]:
    return [(title if i == 0 else "").ljust(10) + line for i, line in enumerate(body)]


def summary(facts: dict[str, Any]) -> list[str]:
    """Everything but the paths of the operators."""
    packs = [
        (f"sm_{p['arch']}" + (" PTX" if p["kind"] == "ptx" else ""), f"{p['kernels']} kernels", size(p["bytes"]))
        for p in sorted(facts["packs"]["files"], key=lambda p: (p["kind"], p["arch"]))
    ]
    devices = [
        (f"cuda:{d['index']}", d["name"], f"sm_{d['capability']}", f"{d['multiprocessors']} multiprocessors")
        for d in facts["devices"]
    ]
    jit = facts["jit"]
    kept = (
        f"{jit['cache']}  {jit['kernels']} kernels, {size(jit['bytes'])}" if jit["cache"] else "no kernel cache folder"
    )
    not_used = [f"not used: {name}: {why}" for name, why in facts["libraries_not_used"].items()]
    return [
        *section("liger-ops", [facts["version"]]),
        *section("torch", [facts["torch"]]),
        *section("library", [facts["library"] or "none: the operators are their reference formulas", *not_used]),
        *section("devices", table(devices) or [f"cpu, {torch.get_num_threads()} threads"]),
        *section(
            "packs", [facts["packs"]["folder"], *table(packs)] if packs else [f"none in {facts['packs']['folder']}"]
        ),
        *section("JIT", [jit["state"], kept]),
    ]


def lines(facts: dict[str, Any]) -> list[str]:
    columns = ["cpu", *(f"cuda:{d['index']}" for d in facts["devices"])]
    paths = [("operator", *columns), *((op, *(by[c] for c in columns)) for op, by in facts["operators"].items())]
    return [*summary(facts), "", *table(paths)]
