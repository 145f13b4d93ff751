"""Builds the kernel packs that tests read, in build/test-packs: python tests/support/host/stub_cuda/packs.py.

The packs hold a sample of each kernel: for compute capability 9.0 and as PTX each config at the first axis point that it
serves, and every third also at the last (usually bf16 and fp32); for other architectures every fourth config, and the last
variant. With LIGER_OPS_TEST_PACKS=all they hold every variant, like the packs of a wheel.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[4]
PACKS = ROOT / "build" / "test-packs"
# Importing the package would import torch, which must not load the stub driver.
spec = importlib.util.spec_from_file_location("archs", ROOT / "liger_ops" / "aot" / "archs.py")
archs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(archs)
ARCHS = archs.ALL
WHOLE = os.environ.get("LIGER_OPS_TEST_PACKS") == "all"


def sample(kernel: Any, arch: int = 90) -> list[Any]:
    """The variants of a kernel that a pack holds."""
    everything = list(kernel.variants())
    if WHOLE:
        return everything
    by_config: dict[int, list[int]] = {}
    for variant in everything:
        by_config.setdefault(variant.index % len(kernel.configs), []).append(variant.index)
    firsts, lasts = (sorted({indices[end] for indices in by_config.values()}) for end in (0, -1))
    held = {*firsts, *lasts[::3]} if arch == 90 else {*firsts[::4]}
    held.add(lasts[-1])
    return [variant for variant in everything if variant.index in held]


def state() -> str:
    """Hash of everything the packs depend on."""
    sources = [*(ROOT / "liger_ops/kernels").rglob("*.py"), *(ROOT / "liger_ops/aot").glob("*.py"), Path(__file__)]
    facts = [str(WHOLE).encode(), *(path.read_bytes() for path in sorted(sources))]
    return hashlib.sha256(b"\n".join(facts)).hexdigest()


def ensure() -> None:
    """Builds the packs if they are missing or stale. Only one process builds; others wait."""
    PACKS.parent.mkdir(exist_ok=True)
    with open(PACKS.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = PACKS.with_suffix(".stamp")
        if not stamp.exists() or stamp.read_text() != state():
            subprocess.run([sys.executable, __file__, "--now"], check=True)
            stamp.write_text(state())


def build() -> None:
    import types

    package = types.ModuleType("liger_ops")
    package.__path__ = [str(ROOT / "liger_ops")]
    sys.modules["liger_ops"] = package
    from liger_ops.aot import build as aot
    from liger_ops.kernels import kernels

    held = {arch: {(k.name, v.index) for k in kernels() for v in sample(k, arch)} for arch in ARCHS}
    variants = [v for k in kernels() for v in sample(k)]
    aot.build_packs(
        PACKS,
        aot.CACHE,
        [*ARCHS],
        os.cpu_count() or 1,
        variants,
        lambda v, arch: (v.kernel.name, v.index) in held[arch],
    )


if __name__ == "__main__":
    build() if "--now" in sys.argv else ensure()
