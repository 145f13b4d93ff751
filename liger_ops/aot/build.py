"""Build-time entry, run by CMake: `build.py codegen DIR`, `build.py declarations PACKAGE` and
`build.py packs DIR --cache DIR --archs ...`."""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path

if __name__ == "__main__":
    # The package's own __init__ loads the library that is being built: stand in for it.
    package = types.ModuleType("liger_ops")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["liger_ops"] = package
    __package__ = "liger_ops.aot"
    import liger_ops.aot  # noqa: F401

from ..kernels import find, kernels
from . import codegen, pack
from .compile import PTX_CAPABILITY, Binary, code_key, compile_variant


def compile_cached(kernel: str, index: int, archs: list[int], cache: Path) -> Binary:
    variant = find(kernel).variant(index)
    path = cache / code_key(variant.kernel, variant, archs)
    if path.exists():
        os.utime(path)
        return pickle.loads(path.read_bytes())
    binary = compile_variant(variant, archs)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(pickle.dumps(binary))
    os.replace(temporary, path)
    return binary


class Progress:
    """One line on a terminal; a line every ten percent in a log."""

    def __init__(self, total: int, what: str) -> None:
        self.total, self.what, self.done, self.start = total, what, 0, time.monotonic()

    def advance(self) -> None:
        self.done += 1
        seconds = time.monotonic() - self.start
        line = f"{self.what} {self.done}/{self.total}  {seconds:.0f} s"
        if sys.stderr.isatty():
            filled = 30 * self.done // self.total
            print(
                f"\r[{'#' * filled}{'.' * (30 - filled)}] {line}",
                end="" if self.done < self.total else "\n",
                file=sys.stderr,
            )
        elif self.done * 10 // self.total != (self.done - 1) * 10 // self.total:
            print(line, file=sys.stderr)


def build_packs(folder: Path, cache: Path, archs: list[int], jobs: int) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    started = time.time()
    variants = [v for k in kernels() if any(map(k.is_for, archs)) for v in k.variants()]
    progress = Progress(len(variants), "compiling kernels")
    entries: dict[int, list[pack.Entry]] = {arch: [] for arch in [*archs, 0]}
    # The compiler's front end leaves many small objects and few cycles among them.
    with ProcessPoolExecutor(jobs, initializer=gc.set_threshold, initargs=(200_000,)) as pool:
        tasks = {pool.submit(compile_cached, v.kernel.name, v.index, archs, cache): v for v in variants}
        for task in as_completed(tasks):
            v, binary = tasks[task], task.result()
            facts = (int(v.kernel.source_hash, 16), v.index, v.name, binary.num_warps, binary.shared)
            for arch, cubin in binary.cubins.items():
                entries[arch].append(pack.Entry(*facts, cubin, v.base))
            # What is for some chips alone cannot be compiled by the driver for others.
            if not v.kernel.archs:
                entries[0].append(pack.Entry(*facts, binary.ptx, v.base))
            progress.advance()
    packs = [(folder / f"sm_{arch}.pack", pack.CUBIN, arch, entries[arch]) for arch in archs]
    packs.append((folder / "ptx.pack", pack.PTX, PTX_CAPABILITY, entries[0]))
    # Threads will do: zlib lets go of the interpreter.
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda arguments: pack.write(*arguments), packs))
    for stale in folder.glob("sm_*.pack"):
        if stale.stem not in {f"sm_{a}" for a in archs}:
            stale.unlink()
    # Entries no build has touched for a month belong to code that is gone.
    for old in cache.iterdir():
        if old.stat().st_mtime < started - 30 * 86400:
            old.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["codegen", "declarations", "packs"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--archs", default="80,90,100,120")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    if args.command == "codegen":
        codegen.generate(args.folder)
    elif args.command == "declarations":
        from . import declarations  # alone in needing torch

        declarations.write(args.folder)
    else:
        build_packs(args.folder, args.cache, [int(a) for a in args.archs.replace(";", ",").split(",") if a], args.jobs)


if __name__ == "__main__":
    main()
