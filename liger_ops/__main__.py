"""`python -m liger_ops`: what is installed, and which path each operator takes here. `--json` for programs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import liger_ops

from . import _jit
from .aot import pack


def describe_packs(folder: Path) -> list[dict[str, Any]]:
    out = []
    for path in sorted(folder.glob("*.pack")):
        entry: dict[str, Any] = {"file": path.name, "bytes": path.stat().st_size}
        try:
            kind, arch, entries = pack.read(path)
            entry |= {"kind": "PTX" if kind == pack.PTX else "cubin", "arch": f"sm_{arch}", "kernels": len(entries)}
        except ValueError as error:
            entry["error"] = str(error)
        out.append(entry)
    return out


def cuda_path(capability: int, packs: list[dict[str, Any]], jit: bool) -> str:
    """Where a kernel for this device comes from first, by the rule of csrc/runtime/arch.h for desktop chips."""
    built = [int(p["arch"][3:]) for p in packs if p.get("kind") == "cubin"]
    if any(arch // 10 == capability // 10 and arch <= capability for arch in built):
        return "aot"
    if jit:
        return "jit"
    return "ptx" if any(p.get("kind") == "PTX" and int(p["arch"][3:]) <= capability for p in packs) else "none"


def public_ops() -> list[str]:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::")}
    return sorted(n.split(".")[0] for n in names if not n.startswith("_"))


def report() -> dict[str, Any]:
    status = liger_ops.status()
    folder = Path(status["pack_directory"])
    packs = describe_packs(folder)
    jit = {
        "enabled": status["jit_enabled"],
        "compiler": _jit.compiler(),
        "cache": status["jit_cache"],
    }
    ready = jit["enabled"] and jit["compiler"] is not None
    devices = [d | {"path": cuda_path(d["capability"], packs, ready)} for d in status["devices"]]
    loaded = liger_ops._loaded
    return {
        "version": liger_ops.__version__,
        "torch": torch.__version__,
        "library": str(loaded.library) if loaded.library else None,
        "not_used": loaded.tried,
        "devices": devices,
        "pack_directory": str(folder),
        "packs": packs,
        "jit": jit,
        "ops": public_ops(),
    }


def text(facts: dict[str, Any]) -> str:
    lines = [f"liger_ops   {facts['version']}", f"torch       {facts['torch']}"]
    library = facts["library"] or "none fits this torch: operators are registered from Python"
    lines.append(f"library     {library}")
    lines += [f"            not used: {name} {why}" for name, why in facts["not_used"].items()]
    lines.append(f"packs       {facts['pack_directory']}")
    for p in facts["packs"]:
        what = p.get("error") or f"{p['kind']:6} {p['kernels']:5} kernels {p['bytes'] / 2**20:6.2f} MiB"
        lines.append(f"            {p['file']:12} {what}")
    jit = facts["jit"]
    state = jit["compiler"] or "no compiler installed"
    lines.append(f"JIT         {state if jit['enabled'] else 'switched off by LIGER_OPS_JIT=0'}, cache {jit['cache'] or 'none'}")
    for d in facts["devices"]:
        major, minor = divmod(d["capability"], 10)
        lines.append(f"device      cuda:{d['index']} {d['name']}, compute capability {major}.{minor}, kernels: {d['path']}")
    if not facts["devices"]:
        lines.append("device      no CUDA device")
    lines.append("device      cpu, kernels: C++" if facts["library"] else "device      cpu, kernels: torch")
    lines.append("operators   " + ", ".join(facts["ops"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m liger_ops", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    facts = report()
    print(json.dumps(facts, indent=2) if parser.parse_args().json else text(facts))


if __name__ == "__main__":
    main()
