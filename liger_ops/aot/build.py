"""Entry point of the build, run by CMake.

build.py codegen DIR
build.py declarations PACKAGE [--generated DIR]
build.py packs DIR --archs ...
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    # A stand-in for the package, whose __init__ would load the library that is being built.
    package = types.ModuleType("liger_ops")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["liger_ops"] = package
    __package__ = "liger_ops.aot"
    import liger_ops.aot  # noqa: F401

from ..kernels import find, kernels
from ..kernels.table import Variant
from . import archs as architectures
from . import codegen, pack
from .compile import PTX_CAPABILITY, Binary, code_key, compile_variant
from .progress import Progress

# One file per variant, named by a hash of everything it depends on.
CACHE = Path(__file__).resolve().parents[2] / "build" / "kernel-cache"


def compile_cached(kernel: str, index: int, archs: list[int], cache: Path) -> Binary:
    variant = find(kernel).variant(index)
    wanted = [arch for arch in archs if variant.kernel.is_for(arch)]
    path = cache / code_key(variant.kernel, variant)
    kept: dict[int, bytes] = {}
    if path.exists():
        binary: Binary = pickle.loads(path.read_bytes())
        kept = binary.cubins
        os.utime(path)
    if missing := [arch for arch in wanted if arch not in kept]:
        binary = compile_variant(variant, missing)
        kept |= binary.cubins
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(pickle.dumps(replace(binary, cubins=kept)))
        os.replace(temporary, path)
    return replace(binary, cubins={arch: kept[arch] for arch in wanted})


def every_variant(archs: list[int]) -> list[Variant]:
    return [v for k in kernels() if any(map(k.is_for, archs)) for v in k.variants()]


def build_packs(
    folder: Path,
    cache: Path,
    archs: list[int],
    jobs: int,
    variants: Iterable[Variant],
    wanted: Callable[[Variant, int], bool] = lambda variant, arch: True,
) -> None:
    """wanted: whether the pack of an architecture holds a variant. The pack of PTX holds all."""
    cache.mkdir(parents=True, exist_ok=True)
    started = time.time()
    variants = [*variants]
    progress = Progress(len(variants), "compiling kernels")
    entries: dict[int, list[pack.Entry]] = {arch: [] for arch in [*archs, 0]}
    # Triton's front end creates many small objects but few cycles: run the garbage collector less often.
    with ProcessPoolExecutor(jobs, initializer=gc.set_threshold, initargs=(200_000,)) as pool:
        tasks = {
            pool.submit(compile_cached, v.kernel.name, v.index, [a for a in archs if wanted(v, a)], cache): v
            for v in variants
        }
        for task in as_completed(tasks):
            v, binary = tasks[task], task.result()
            facts = (int(v.kernel.source_hash, 16), v.index, v.name, binary.num_warps, binary.shared)
            for arch, cubin in binary.cubins.items():
                entries[arch].append(pack.Entry(*facts, cubin))
            # Kernels that support only some architectures have no portable PTX.
            if not v.kernel.archs:
                entries[0].append(pack.Entry(*facts, binary.ptx))
            progress.advance()
    packs = [(folder / f"sm_{arch}.pack", pack.CUBIN, arch, entries[arch]) for arch in archs]
    if archs:
        packs.append((folder / "ptx.pack", pack.PTX, PTX_CAPABILITY, entries[0]))
    for arguments in packs:
        pack.write(*arguments)
    for stale in {*folder.glob("*.pack")} - {path for path, *_ in packs}:
        stale.unlink()
    # Remove cache entries that no build has used for a month.
    for old in cache.iterdir():
        if old.stat().st_mtime < started - 30 * 86400:
            old.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["codegen", "declarations", "packs"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--generated", type=Path)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--archs", type=architectures.asked_for, default="all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.command == "codegen":
        codegen.generate(args.folder)
    elif args.command == "declarations":
        from . import declarations  # imported here: only this command needs torch

        declarations.write(args.folder, args.generated)
    else:
        build_packs(args.folder, args.cache, args.archs, args.jobs, every_variant(args.archs))


if __name__ == "__main__":
    main()
