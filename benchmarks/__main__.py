"""python -m benchmarks: time ours and its peers, compare two results, write a page again, tune launch configs and the
tiles of GEMMs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks import compare, gemm, report, tune, warm
from benchmarks.arguments import add_out, positive, shape_of
from benchmarks.clock import COVER, CpuClock, CudaClock
from benchmarks.harness import COLD_START_RUNS, HOST_TURNS, Case, Runner
from benchmarks.machine import describe, slug
from benchmarks.op import Anchor, Op
from benchmarks.providers import DEFAULT_PROVIDERS, PROVIDERS, discover, is_ours
from benchmarks.records import Record, line, size

ROUNDS = {"quick": 5, "full": 5, "paper": 5, "anchors": 9}
FLUSHES = {"full": COVER, "paper": COVER}
KNOWN_DTYPES = ("float32", "float16", "bfloat16")  # fp64 is the reference
DTYPES = {
    "quick": ("bfloat16",),
    "quick-cpu": ("float32",),
    "full": ("bfloat16", "float16", "float32"),
    "paper": ("bfloat16",),
}


class Progress:
    """One line that is updated on a terminal; elsewhere one line for every 10 % of the run."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.printed = max(total, 1), 0, -1
        self.live, self.start = sys.stderr.isatty(), time.monotonic()

    def tick(self, what: str) -> None:
        share = min(self.done / self.total, 1.0)
        self.done += 1
        bar = "█" * int(24 * share) + "·" * (24 - int(24 * share))
        line = f"{bar} {share:4.0%} {time.monotonic() - self.start:4.0f} s  {what}"
        if self.live:
            print(f"\r\033[K{line[:118]}", end="", file=sys.stderr, flush=True)
        elif int(10 * share) > self.printed:
            self.printed = int(10 * share)
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parse(argv: Sequence[str], ops: dict[str, Op]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time the ops and their peers. Also: 'compare A.jsonl B.jsonl', 'report A.jsonl --add B.jsonl', "
        "'tune OP', 'gemm'.",
    )
    parser.add_argument("--suite", choices=ROUNDS, default="quick")
    parser.add_argument("--ops", type=names, help=f"comma-separated; default: {','.join(ops)}")
    parser.add_argument("--providers", type=names, help=f"comma-separated; known: {','.join(PROVIDERS)}")
    parser.add_argument("--dtypes", type=names, help="comma-separated; default: the suite's")
    parser.add_argument("--shapes", nargs="+", type=shape_of, metavar="ROWSxN", help="only these shapes of the suite")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_out(parser)
    parser.add_argument("--rounds", type=positive)
    parser.add_argument(
        "--warm", type=positive, metavar="JOBS", help="processes that compile the cases of torch.compile first"
    )
    args = parser.parse_args(argv)
    args.providers = args.providers or list(DEFAULT_PROVIDERS.get((args.suite, args.device), PROVIDERS))
    args.ops = args.ops or list(ops)
    args.rounds = args.rounds or ROUNDS[args.suite]
    for option, known in (("ops", ops), ("providers", PROVIDERS), ("dtypes", KNOWN_DTYPES)):
        if unknown := [name for name in getattr(args, option) or () if name not in known]:
            parser.error(f"--{option} must be among {', '.join(known)} (got {', '.join(unknown)})")
    shapes = {case.shape for case, _ in cases(args, ops)}
    if unknown := [size(shape) for shape in args.shapes or () if shape not in shapes]:
        parser.error(f"--shapes must be among {', '.join(map(size, sorted(shapes)))} (got {', '.join(unknown)})")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu where torch sees no CUDA device (got cuda)")
    return args


def cases(args: argparse.Namespace, ops: dict[str, Op]) -> list[tuple[Case, list[Anchor]]]:
    if args.suite == "anchors":
        found: dict[tuple, tuple[Case, list[Anchor]]] = {}
        for name in args.ops:
            for anchor in ops[name].anchors:
                if anchor.device == args.device and (not args.dtypes or anchor.dtype in args.dtypes):
                    case = Case(name, ops[name], anchor.shape, anchor.dtype)
                    found.setdefault((name, anchor.shape, anchor.dtype), (case, []))[1].append(anchor)
        return list(found.values())
    suite = "quick-cpu" if (args.suite, args.device) == ("quick", "cpu") else args.suite
    return [
        (Case(name, ops[name], shape, dtype), [])
        for name in args.ops
        for dtype in args.dtypes or ops[name].dtypes.get(suite, DTYPES[suite])
        for shape in ops[name].shapes.get(suite, ())
    ]


def run(args: argparse.Namespace, ops: dict[str, Op]) -> int:
    planned = cases(args, ops)
    hosts = [name for name in args.ops if args.suite != "paper" and args.device in ops[name].host]
    cold = [name for name in args.ops if args.suite == "anchors" and ops[name].cold_start]
    if args.shapes:
        planned = [(case, anchors) for case, anchors in planned if case.shape in args.shapes]
        hosts = cold = []
    cold_steps = sum(COLD_START_RUNS * sum(p in args.providers for p in ops[name].cold_start) for name in cold)
    compiled = [case for case, _ in planned] if args.warm and warm.PROVIDER in args.providers else []
    steps = len(planned) * (len(args.providers) + args.rounds)
    steps += len(hosts) * (len(args.providers) + HOST_TURNS * args.rounds)
    progress = Progress(steps + cold_steps + len(compiled))
    if compiled:
        warm.compile_ahead(compiled, args.device, args.warm, progress.tick)

    flushes = FLUSHES.get(args.suite, 1)
    clock = CudaClock(flushes) if args.device == "cuda" else CpuClock()
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"{slug(args.device)}-{args.suite}"
    records: list[Record] = []
    with open(args.out / f"{stem}.jsonl", "w") as lines:

        def emit(record: Record) -> None:
            records.append(record)
            print(line(record), file=lines, flush=True)

        settings = {"suite": args.suite, "providers": args.providers, "rounds": args.rounds, "flushes": flushes}
        emit(describe(args.device) | settings)
        runner = Runner(clock, args.suite, args.providers, args.rounds, emit, progress.tick)
        with_matmul = any(ops[name].flops for name in args.ops)
        runner.measure_ceilings(with_matmul)
        for name in cold:
            runner.cold_start(name, ops[name])
        for name in hosts:
            runner.host(name, ops[name], must=args.suite == "anchors")
        for case, anchors in planned:
            runner.time(case, anchors)
        runner.measure_ceilings(with_matmul)
    progress.close()
    print(report.write(records, args.out / stem))
    return int(any(map(failed, records)))


def failed(record: Record) -> bool:
    """Whether a record fails the run. Peers that crash or are wrong are reported and do not fail it."""
    if record.get("state") in ("crashed", "wrong"):
        return record["provider"] == "every provider" or is_ours(record["provider"])
    return record.get("verdict") in ("FAIL", "NOT MEASURED")


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["compare"]:
        return compare.main(argv[1:])
    if argv[:1] == ["report"]:
        return report.main(argv[1:])
    if argv[:1] == ["tune"]:
        return tune.main(argv[1:])
    if argv[:1] == ["gemm"]:
        return gemm.main(argv[1:])
    ops = discover()
    return run(parse(argv, ops), ops)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
