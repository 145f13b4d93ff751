"""A description of the machine, for the first record of a result."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch

from benchmarks.arguments import command
from benchmarks.providers import PACKAGES


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            found = re.search(r"^model name\s*:\s*(.+)$", info.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return None


def busy() -> str:
    """A remark, if other programs share the cores: their times are then not ours alone."""
    load = os.getloadavg()[0]
    return f"busy: other programs used {load:.1f} of {os.cpu_count()} cores" if load >= 0.5 else ""


def describe(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kind": "machine",
        "command": command(),
        "device": device,
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    found |= {p: v for p in ("triton", "liger-ops", *PACKAGES) if (v := version(p))}
    if remark := busy():
        found["load"] = remark
        print(f"warning: {remark}", file=sys.stderr)
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "driver": driver(), "cuda": torch.version.cuda}
    return found


def slug(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu-{cpu_name()}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
