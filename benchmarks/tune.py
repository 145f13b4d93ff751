"""python -m benchmarks tune OP: sweep the launch shapes of an op's kernels on this GPU, propose rows for their tables.

With --as-is nothing is swept: it times each kernel of the op alone, with the configs of the tables.

The op runs forward and backward on its own host code, with a candidate in place of the config in the table. A candidate is
timed only if the op's results are right. Its time is that of the kernel alone, between two events around each launch, with
a cold cache.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import positive, shape_of
from benchmarks.clock import COVER, CudaClock, measure_ceilings
from benchmarks.harness import Case, Problem, WrongResult
from benchmarks.providers import discover, load

# The kernel or the host's buffers depend on these values, so they are not varied. KEEP, the columns that a program keeps in
# shared memory, is varied in whole tiles.
FIXED = {"ALIGNED", "SKEWED", "SHARE", "KEEP", "KEEPS_ALL", "ONE_ROW"}
LANE_COLUMNS = 8  # 16-bit ones
SWITCHES = {"PREFETCH", "EARLY", "AHEAD"}
MOST_WARPS, MOST_PROGRAMS_PER_SM = 32, 8
SAMPLES, STEPS = 30, 6
COLUMNS = ("kernel", "shape", "dtype", "the op's bytes, µs", "kernel, µs", "of the ceiling", "must be")  # of --as-is
FASTER = 0.98  # a smaller gain does not change a row


def compile_one(name: str, point: int, config: Any, capability: int) -> Any:
    """A variant's binary, or the reason why there is none. The arguments are small because variants cannot be pickled."""
    from liger_ops.aot.compile import compile_variant
    from liger_ops.kernels import find

    try:
        return compile_variant(replace(find(name), configs=[config]).variant(point), [capability])
    except Exception as error:  # a config that the compiler rejects is no candidate
        # Triton's error quotes the source; its cause gives the reason.
        why: BaseException = error
        while why.__cause__:
            why = why.__cause__
        return f"{type(why).__name__}: {(str(why).splitlines() or [''])[0]}"


class Host:
    """The host code of the operators, with a candidate in place of one config of a kernel's table."""

    def __init__(self, runtime: Any, device: int, capability: int, clock: Any, jobs: int | None = None) -> None:
        self.runtime, self.device, self.capability, self.clock = runtime, device, capability, clock
        self.binaries: dict[tuple[str, int, str], Any] = {}
        # Not a fork: this process has threads and a CUDA context.
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0)), mp_context=spawn)

    def launched(self, run: Callable[[], Any]) -> dict[str, list[list[Any]]]:
        """Kernel name -> the variants that a run launches, in one list those of one config, which differ in their points."""
        from liger_ops.kernels import kernels

        found: dict[str, set[int]] = {k.name: set() for k in kernels()}
        for name, seen in found.items():
            self.runtime.watch(name, lambda: None, lambda n=name, s=seen: s.add(self.runtime.last_variant(n)))
        try:
            run()
        finally:
            for name in found:
                self.runtime.watch(name, None)
        out: dict[str, list[list[Any]]] = {}
        for kernel in kernels():
            by_config: dict[int, list[Any]] = {}
            for index in sorted(found[kernel.name]):
                by_config.setdefault(index % len(kernel.configs), []).append(kernel.variant(index))
            if by_config:
                out[kernel.name] = list(by_config.values())
        return out

    def compile(self, variants: Sequence[Any], configs: Sequence[Any]) -> list[str | None]:
        """For each config, the reason why it cannot replace that of these variants, or None."""
        keys = [[self.key(variant, config) for variant in variants] for config in configs]
        tasks = {
            key: self.pool.submit(compile_one, key[0], key[1], config, self.capability)
            for ks, config in zip(keys, configs)
            for key in ks
            if key not in self.binaries
        }
        self.binaries |= {key: task.result() for key, task in tasks.items()}
        return [next((b for key in ks if isinstance(b := self.binaries[key], str)), None) for ks in keys]

    @staticmethod
    def key(variant: Any, config: Any) -> tuple[str, int, str]:
        return variant.kernel.name, variant.index // len(variant.kernel.configs), repr(config)

    def choose(self, variants: Sequence[Any], config: Any) -> None:
        from liger_ops.aot import pack

        (why,) = self.compile(variants, [config])
        if why:
            raise WrongResult(why)
        kernel, entries = variants[0].kernel, []
        for variant in variants:
            binary = self.binaries[self.key(variant, config)]
            facts = (int(kernel.source_hash, 16), variant.index, variant.name, binary.num_warps, binary.shared)
            entries.append(pack.Entry(*facts, binary.cubins[self.capability]))
        packed = pack.dumps(pack.CUBIN, self.capability, entries)
        indices = [variant.index for variant in variants]
        about = kernel.config_bytes(config), len(kernel.configs), indices
        self.runtime.try_config(kernel.name, self.device, *about, packed)

    def restore(self, name: str) -> None:
        self.runtime.end_trial(name)

    def time(self, name: str, run: Callable[[], Any]) -> float:
        """Median microseconds of all launches of a kernel in a run."""
        events: list[Any] = []
        moments = []

        def record() -> None:
            moments.append(torch.cuda.Event(enable_timing=True))
            moments[-1].record()

        def before() -> None:
            for _ in range(self.clock.flushes):
                self.clock.flush.zero_()
            record()

        self.runtime.watch(name, before, record)
        try:
            for _ in range(SAMPLES):
                moments.clear()
                run()
                events.append([*moments])
        finally:
            self.runtime.watch(name, None)
        torch.cuda.synchronize()
        pairs = [zip(found[::2], found[1::2]) for found in events]
        return statistics.median(sum(start.elapsed_time(end) for start, end in pair) for pair in pairs) * 1e3


def developers_runtime() -> Any:
    """The runtime's Python module. Only a build from source has it."""
    import liger_ops

    sys.path.insert(0, str(Path(liger_ops.__file__).parent / "lib"))
    try:
        return importlib.import_module("_runtime")
    except ImportError as error:
        raise RuntimeError("tune: the build has no _runtime module: install pybind11 and build again") from error
    finally:
        sys.path.pop(0)


def climb(
    host: Host, variants: Sequence[Any], run: Callable[[], Any], check: Callable[[], None], tell: Callable[[str], None]
) -> list[tuple[float, Any]]:
    """(microseconds, config) of the row in the table and of every right candidate that was tried.

    run: runs the op. check: raises WrongResult if the op's results are wrong.
    """
    kernel, present = variants[0].kernel, variants[0].config
    name = kernel.name
    times = {repr(present): (host.time(name, run), present)}
    tried = set(times)
    for _ in range(STEPS):
        best, config = min(times.values(), key=lambda found: found[0])
        new = [c for c in neighbours(config, smallest_share(kernel)) if repr(c) not in tried]
        tried |= {repr(c) for c in new}
        refused = host.compile(variants, new)
        for candidate, why in zip(new, refused):
            if why is None:
                try:
                    host.choose(variants, candidate)
                    check()
                    times[repr(candidate)] = (host.time(name, run), candidate)
                except (WrongResult, RuntimeError) as error:
                    why = str(error)
                finally:
                    host.restore(name)
            tell(f"{name}: {row(candidate)}: " + (why or f"{times[repr(candidate)][0]:.1f} us"))
        if min(times.values(), key=lambda found: found[0])[0] >= FASTER * best:
            break
    return list(times.values())


def smallest_share(kernel: Any) -> int:
    """The smallest SHARE in the table: the host has no room for more parts of a row."""
    return min((c.constexprs["SHARE"] for c in kernel.configs if c.constexprs.get("SHARE")), default=0)


def keeping(config: Any, more_tiles: int = 0) -> Any:
    """The config with KEEP rounded up to whole tiles. SHARE follows if it equals KEEP."""
    c = config.constexprs
    if not c.get("KEEP"):
        return config
    tile = c["LANES"] * c["TILES"] * LANE_COLUMNS
    keep = (-(-c["KEEP"] // tile) + more_tiles) * tile
    return replace(config, constexprs=c | {"KEEP": keep} | ({"SHARE": keep} if c["SHARE"] == c["KEEP"] else {}))


def neighbours(config: Any, least_share: int = 0) -> Iterator[Any]:
    """Configs with one number doubled or halved; with one doubled and another halved; with one switch flipped; with one
    pipeline stage more or less; or with one tile more or less in KEEP, also with one program per SM less or more."""
    numbers = {"num_warps": config.num_warps, "programs_per_sm": config.programs_per_sm, **config.constexprs}
    free = [k for k, v in numbers.items() if v > 0 and k not in FIXED | SWITCHES]

    def scaled(changes: Mapping[str, float]) -> Any:
        new = {k: int(v * changes.get(k, 1)) for k, v in numbers.items()}
        legal = all(new[k] >= 1 and new[k] == numbers[k] * changes[k] for k in changes)
        if not legal or new["num_warps"] > MOST_WARPS or new["programs_per_sm"] > MOST_PROGRAMS_PER_SM:
            return None
        warps, programs = new.pop("num_warps"), new.pop("programs_per_sm")
        return keeping(replace(config, num_warps=warps, programs_per_sm=programs, constexprs=new))

    changes = [{k: factor} for k in free for factor in (2, 0.5)]
    changes += [{a: 2, b: 0.5} for a in free for b in free if a != b]
    found = [found for change in changes if (found := scaled(change)) is not None]
    for k in SWITCHES & numbers.keys():
        found.append(replace(config, constexprs={**config.constexprs, k: 1 - config.constexprs[k]}))
    if stages := config.constexprs.get("STAGES"):
        found += [replace(config, constexprs={**config.constexprs, "STAGES": stages + by}) for by in (1, -1)]
    if config.constexprs.get("KEEP"):
        found += [keeping(config, 1), keeping(config, -1)]
        if config.programs_per_sm > 1:
            found += [replace(keeping(config, by), programs_per_sm=config.programs_per_sm - by) for by in (1, -1)]
    for candidate in found:
        share, keep = (candidate.constexprs.get(k, 0) for k in ("SHARE", "KEEP"))
        if (not share or share >= least_share) and (keep or not config.constexprs.get("KEEP")):
            yield candidate


def row(config: Any) -> str:
    """The config as in a table, without default arguments."""
    programs = f", programs_per_sm={config.programs_per_sm}" if config.programs_per_sm else ""
    constexprs = ", ".join(f"{k}={v}" for k, v in config.constexprs.items())
    return f"Config({config.max_n}, {config.aligned}, {config.num_warps}{programs}, constexprs=dict({constexprs}))"


def proposal(name: str, case: Case, found: Sequence[tuple[float, Any]], gpu: str, top: int) -> list[str]:
    (stock, present), ordered = found[0], sorted(found, key=lambda pair: pair[0])
    shape = "x".join(map(str, case.shape))
    lines = [f"{name}, {shape} {case.dtype}, {gpu}", f"  table    {stock:8.1f} us  {row(present)}"]
    lines += [f"           {time:8.1f} us  {row(config)}" for time, config in ordered[:top] if config != present]
    best, config = ordered[0]
    if best >= FASTER * stock:
        return [*lines, f"  keep it: nothing is more than {100 * (1 - FASTER):.0f} % faster"]
    return [*lines, f"  propose: {row(config)},  # {shape} {case.dtype}: {best:.1f} us (was {stock:.1f}), {gpu}"]


def measurement(name: str, case: Case, time: float, copy_gb_s: float) -> tuple[str, bool]:
    """A row of the table of --as-is, and whether it meets its limit. The op's bytes are those that all of its kernels must
    move together."""
    floor = sum(case.op.traffic(case.torch_dtype.itemsize, *case.shape)) / copy_gb_s / 1e3
    least = case.op.kernels_must.get(name)
    passes = least is None or floor >= least * time
    verdict = "" if least is None else f"≥ {100 * least:g} %: {'pass' if passes else 'FAIL'}"
    shape = "×".join(map(str, case.shape))
    cells = name, shape, case.dtype, f"{floor:.1f}", f"{time:.1f}", f"{100 * floor / time:.1f} %", verdict
    return f"| {' | '.join(cells)} |", passes


def parse(argv: Sequence[str]) -> argparse.Namespace:
    ops = discover()
    parser = argparse.ArgumentParser(prog="python -m benchmarks tune", description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=ops, metavar="OP", help=", ".join(ops))
    parser.add_argument("--kernels", nargs="*", metavar="KERNEL", help="default: all that the op launches")
    parser.add_argument("--shapes", nargs="*", type=shape_of, metavar="ROWSxN", help="default: the op's anchors")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--as-is", action="store_true", help="only time the configs of the tables")
    parser.add_argument("--top", type=positive, default=4, help="number of candidates to list for each kernel")
    args = parser.parse_args(argv)
    args.op_file = ops[args.op]
    anchors = (a.shape for a in args.op_file.anchors if a.device == "cuda" and a.dtype == args.dtype)
    args.shapes = args.shapes or list(dict.fromkeys(anchors))
    if not args.shapes:
        parser.error(f"--shapes must be given: {args.op} has no anchors in {args.dtype}")
    if not torch.cuda.is_available():
        parser.error("tuning needs a CUDA device, but torch sees none")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    call = load(args.op_file, "ours")
    device = torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability()
    host = Host(developers_runtime(), device, 10 * major + minor, CudaClock(COVER))
    gpu = torch.cuda.get_device_name()
    if args.as_is:
        ceiling = measure_ceilings(host.clock, False)["copy_gb_s"]
        print(f"{gpu}, copy ceiling {ceiling:.0f} GB/s\n")
        print(f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    failed = False
    for shape in args.shapes:
        case = Case(args.op, args.op_file, shape, args.dtype)
        problem = Problem(case, "cuda")
        problem.learn_truth()

        def run(problem: Problem = problem) -> Any:
            return problem.checked_results(call)

        def check(problem: Problem = problem) -> None:
            problem.check(problem.checked_results(call), strict=True)

        check()
        launched = host.launched(run)
        for name in args.kernels or launched:
            if args.as_is:
                line, passes = measurement(name, case, host.time(name, run), ceiling)
                print(line, flush=True)
                failed |= not passes
                continue
            for variants in launched[name]:
                found = climb(host, variants, run, check, lambda line: print(line, file=sys.stderr))
                print("\n".join(proposal(name, case, found, gpu, args.top)), flush=True)
        problem.forget_truth()
    return int(failed)
