"""python -m benchmarks tune OP: sweep the launch shapes of an op's kernels on the GPU at hand, propose their tables' rows.

With --as-is it sweeps nothing: it says what each kernel takes alone, without the others that its op launches.

The op runs whole, forward and backward, with its operators registered from Python: every launch then passes through one
function, which is replaced here by one that takes another config for one kernel. A candidate must leave the op's results
right before it is timed, and its time is that kernel's alone, in the state that the op left the kernel's arguments in.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.arguments import positive, shape_of
from benchmarks.harness import COVER, Case, Clock, CudaClock, Problem, WrongResult, measure_ceilings
from benchmarks.providers import discover, load

# What the code assumes of its arguments, or the host's buffers of the code: no matter of speed alone. KEEP, what a program
# keeps in shared memory, changes by tiles of its own.
FIXED = {"ALIGNED", "SKEWED", "SHARE", "KEEP", "KEEPS_ALL", "ONE_ROW"}
LANE_COLUMNS = 8  # of 16 bits
CU_FUNCTION_DYNAMIC_SHARED = 8
SWITCHES = {"PREFETCH", "EARLY", "AHEAD"}
MOST_WARPS, MOST_PROGRAMS_PER_SM = 32, 8  # the second is what hosts of persistent programs allocate for
SAMPLES, STEPS = 30, 6
COLUMNS = ("kernel", "shape", "dtype", "the op's bytes, µs", "kernel, µs", "of the ceiling", "must be")  # of --as-is
FASTER = 0.98  # a smaller gain is no reason to change a row


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel within the op, as its host code asked for it."""

    name: str
    choices: Mapping[str, Any]
    width: int
    aligned: bool
    grid: Callable[[Any], tuple[int, int, int]]
    args: Mapping[str, Any]
    before: Mapping[str, torch.Tensor]  # what its tensors held

    @property
    def kernel(self) -> Any:
        from liger_ops.kernels import find

        return find(self.name)

    @property
    def config(self) -> Any:
        return self.kernel.pick(self.choices, self.width, self.aligned, self.args.get("rows")).config

    def variant(self, config: Any) -> Any:
        return replace(self.kernel, configs=[config]).pick(
            self.choices, self.width, self.aligned, self.args.get("rows")
        )

    def restore(self) -> None:
        for name, value in self.before.items():
            self.args[name].detach().copy_(value)


class Interpreter:
    """Runs kernels on CPU tensors under TRITON_INTERPRET=1."""

    def compile(self, variants: Sequence[Any]) -> list[str | None]:
        return [None] * len(variants)

    def run(self, launch: Launch, config: Any) -> None:
        # It cannot point at nothing: what a kernel does not touch may be anything.
        args = {k: torch.empty(1) if v is None else v for k, v in launch.args.items()}
        launch.kernel.function[launch.grid(config)](**args, **launch.variant(config).constexprs)


def compile_one(name: str, point: int, config: Any, capability: int) -> Any:
    """A variant's binary, or why there is none. Whole variants do not pickle."""
    from liger_ops.aot.compile import compile_variant
    from liger_ops.kernels import find

    try:
        return compile_variant(replace(find(name), configs=[config]).variant(point), [capability])
    except Exception as error:  # a shape that the compiler refuses is a candidate less
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class Driver:
    """Compiles as the packs are compiled and launches as the runtime does."""

    def __init__(self, capability: int, jobs: int | None = None) -> None:
        self.cuda, self.capability, self.functions = ctypes.CDLL("libcuda.so.1"), capability, {}
        # This process has threads and a context of CUDA, which a fork would carry along.
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(jobs or len(os.sched_getaffinity(0)), mp_context=spawn)

    def call(self, name: str, *args: Any) -> None:
        status = getattr(self.cuda, name)(*args)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    @staticmethod
    def key(variant: Any) -> tuple[str, int, str]:
        return variant.kernel.name, variant.index, repr(variant.config)

    def compile(self, variants: Sequence[Any]) -> list[str | None]:
        """What is wrong with each, if anything."""
        from liger_ops.aot.compile import PLAIN_SHARED_BYTES

        new = {self.key(v): v for v in variants if self.key(v) not in self.functions}
        tasks = {
            key: self.pool.submit(compile_one, v.kernel.name, v.index, v.config, self.capability)
            for key, v in new.items()
        }
        for key, task in tasks.items():
            binary = task.result()
            if not isinstance(binary, str):
                module, function = ctypes.c_void_p(), ctypes.c_void_p()
                self.call("cuModuleLoadData", ctypes.byref(module), binary.cubins[self.capability])
                self.call("cuModuleGetFunction", ctypes.byref(function), module, new[key].kernel.symbol.encode())
                if binary.shared > PLAIN_SHARED_BYTES:
                    self.call("cuFuncSetAttribute", function, CU_FUNCTION_DYNAMIC_SHARED, binary.shared)
                binary = (function, binary)
            self.functions[key] = binary
        found = [self.functions[self.key(v)] for v in variants]
        return [f if isinstance(f, str) else None for f in found]

    def run(self, launch: Launch, config: Any) -> None:
        from liger_ops.fallback import runtime

        variant = launch.variant(config)
        (why,) = self.compile([variant])
        if why:
            raise WrongResult(why)
        function, binary = self.functions[self.key(variant)]
        packed = runtime.pack_arguments(launch.kernel, runtime.addresses_and_numbers(launch.args))
        size = ctypes.c_size_t(len(packed))
        # The driver's keys: 1 the buffer, 2 the address of its size, 0 the end.
        buffer = ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value
        extra = (ctypes.c_void_p * 5)(1, buffer, 2, ctypes.addressof(size), 0)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else None)
        threads = 32 * binary.num_warps
        self.call(
            "cuLaunchKernel", function, *launch.grid(config), threads, 1, 1, binary.shared, stream, None, extra
        )  # fmt: skip


@dataclass
class Tuner:
    """Stands in for the function through which operators registered from Python launch."""

    executor: Interpreter | Driver
    clock: Clock
    chosen: dict[str, Any] = field(default_factory=dict)  # kernel -> config, where not its table's
    launches: dict[str, Launch] = field(default_factory=dict)  # the last of every kernel

    def launch(self, op, name, choices, width, grid, args, device, may_be_aligned=True) -> None:
        from liger_ops.fallback import runtime
        from liger_ops.kernels import find

        kernel = find(name)
        aligned = may_be_aligned and runtime.is_aligned(kernel, runtime.addresses_and_numbers(args))
        before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
        found = self.launches[name] = Launch(name, choices, width, aligned, grid, args, before)
        self.executor.run(found, self.chosen.get(name, found.config))

    def time(self, launch: Launch, config: Any) -> float:
        """Median microseconds."""
        samples = self.clock.samples(launch.restore, lambda _: self.executor.run(launch, config), SAMPLES)
        return statistics.median(samples)

    def climb(self, name: str, check: Callable[[], None], tell: Callable[[str], None]) -> list[tuple[float, Any]]:
        """(microseconds, config) of the table's row and of every right candidate met on the way to faster ones.

        check: runs the op and raises WrongResult if it is not what it should be.
        """
        check()
        launch = self.launches[name]
        times = {repr(launch.config): (self.time(launch, launch.config), launch.config)}
        tried = set(times)
        for _ in range(STEPS):
            best, config = min(times.values(), key=lambda found: found[0])
            new = [c for c in neighbours(config, smallest_share(launch.kernel)) if repr(c) not in tried]
            tried |= {repr(c) for c in new}
            refused = self.executor.compile([launch.variant(c) for c in new])
            for candidate, why in zip(new, refused):
                if why is None:
                    try:
                        self.chosen[name] = candidate
                        check()
                        times[repr(candidate)] = (self.time(self.launches[name], candidate), candidate)
                    except (WrongResult, RuntimeError) as error:
                        why = str(error)
                    finally:
                        self.chosen.pop(name, None)
                tell(f"{name}: {row(candidate)}: " + (why or f"{times[repr(candidate)][0]:.1f} us"))
            if min(times.values(), key=lambda found: found[0])[0] >= FASTER * best:
                break
        return list(times.values())


def smallest_share(kernel: Any) -> int:
    """The host has room for as many parts of a row as the table's smallest part makes."""
    return min((c.constexprs["SHARE"] for c in kernel.configs if c.constexprs.get("SHARE")), default=0)


def keeping(config: Any, more_tiles: int = 0) -> Any:
    """With KEEP in whole tiles; SHARE goes with it where a program's part is what it keeps."""
    c = config.constexprs
    if not c.get("KEEP"):
        return config
    tile = c["LANES"] * c["TILES"] * LANE_COLUMNS
    keep = (-(-c["KEEP"] // tile) + more_tiles) * tile
    return replace(config, constexprs=c | {"KEEP": keep} | ({"SHARE": keep} if c["SHARE"] == c["KEEP"] else {}))


def neighbours(config: Any, least_share: int = 0) -> Iterator[Any]:
    """One number doubled or halved, or one doubled and another halved, or a switch turned, or a tile more or less kept,
    for a program less or more."""
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
    if config.constexprs.get("KEEP"):
        found += [keeping(config, 1), keeping(config, -1)]
        if config.programs_per_sm > 1:
            found += [replace(keeping(config, by), programs_per_sm=config.programs_per_sm - by) for by in (1, -1)]
    for candidate in found:
        share, keep = (candidate.constexprs.get(k, 0) for k in ("SHARE", "KEEP"))
        if (not share or share >= least_share) and (keep or not config.constexprs.get("KEEP")):
            yield candidate


def row(config: Any) -> str:
    """As a table has it, without what an argument's default says."""
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
    """A row of the table of --as-is, and whether it is as it must be. The op's bytes: what all of its kernels together must
    move."""
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
    parser.add_argument("--kernels", nargs="*", metavar="KERNEL", help="default: every one that the op launches")
    parser.add_argument("--shapes", nargs="*", type=shape_of, metavar="ROWSxN", help="default: the op's anchors")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--as-is", action="store_true", help="time the tables' rows alone")
    parser.add_argument("--top", type=positive, default=4, help="how many candidates to list for each")
    args = parser.parse_args(argv)
    args.op_file = ops[args.op]
    anchors = (a.shape for a in args.op_file.anchors if a.device == "cuda" and a.dtype == args.dtype)
    args.shapes = args.shapes or list(dict.fromkeys(anchors))
    if not args.shapes:
        parser.error(f"--shapes must be given: {args.op} has no anchors in {args.dtype}")
    if not torch.cuda.is_available():
        parser.error("tuning needs a CUDA device, torch sees none")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if "liger_ops" in sys.modules:
        raise RuntimeError("tune: liger_ops must not be imported yet")
    os.environ["LIGER_OPS_LIBRARY"] = "0"
    from liger_ops.fallback import runtime

    major, minor = torch.cuda.get_device_capability()
    tuner = Tuner(Driver(10 * major + minor), CudaClock(COVER))
    runtime.launch = tuner.launch
    call = load(args.op_file, "ours")
    gpu = torch.cuda.get_device_name()
    if args.as_is:
        ceiling = measure_ceilings(tuner.clock, False)["copy_gb_s"]
        print(f"{gpu}, copy ceiling {ceiling:.0f} GB/s\n")
        print(f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|", flush=True)
    failed = False
    for shape in args.shapes:
        case = Case(args.op, args.op_file, shape, args.dtype)
        problem = Problem(case, "cuda")
        problem.learn_truth()

        def check(problem: Problem = problem) -> None:
            problem.check(problem.checked_results(call), strict=True)

        check()
        for name in args.kernels or list(tuner.launches):
            if args.as_is:
                launch = tuner.launches[name]
                line, passes = measurement(name, case, tuner.time(launch, launch.config), ceiling)
                print(line, flush=True)
                failed |= not passes
                continue
            found = tuner.climb(name, check, lambda line: print(line, file=sys.stderr))
            print("\n".join(proposal(name, case, found, gpu, args.top)), flush=True)
        problem.forget_truth()
        tuner.launches.clear()
    return int(failed)
