"""Two checkouts of this project, operator by operator on a CPU: have their results the same bits, and which is faster?

python -m benchmarks.cpu_operators OTHER     times of this checkout over those of OTHER, a folder in which it is built

Both run in a process of their own, on one core, and take turns every few milliseconds. Ratios are of the fastest turns.
What seems slower is measured again, also in new processes, because where memory lies makes single cases slower: even a
library against itself. Each makes the calls of its own package."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
# Rows and columns of a training step in small, so that loops take most of the time. Small calls show the host's part.
LARGE = dict(n=1024, m=512, V=4096, D=64, Hq=8, Hk=4, S=64, R=64, T=128, N=128, E=4, I=256, H=256, C=256, d=64)
LARGE_ROWS = [2, 64]
DTYPES = ("float32", "bfloat16", "float16")
TURN, TURNS, AGAIN = 4e-3, 8, 4  # seconds of a turn, turns of a case, and how often at most it is measured
PROCESSES = 4  # of each, for what is slow
SLOWER, GEOMETRIC_MEAN = 1.05, 1.01
REFUSED = "error: "


class Case(NamedTuple):
    op: str
    size: str
    dtype: str
    backward: bool

    def __str__(self) -> str:
        return f"{self.op} {self.size} {self.dtype} {'forward and backward' if self.backward else 'forward'}"


# ---- In a checkout


def converted(value: Any, dtype: Any) -> Any:
    import torch

    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return [converted(v, dtype) for v in value]
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    if value.is_complex():
        dtype = torch.complex128 if dtype == torch.float64 else torch.complex64
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


def tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors(v)


def one_process() -> str:
    """The name of a group that vocab-parallel operators take."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD.group_name


def with_group(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """With a group of one process, if the operator needs one."""
    schema = getattr(torch_operators(), op).default._schema
    if "group" not in {a.name for a in schema.arguments if not a.has_default_value()}:
        return arguments
    logits, weight = arguments.get("logits"), arguments.get("weight", arguments.get("s_weight"))
    classes = weight.shape[0] if logits is None else logits.shape[-1]
    without_map = {"vocab_map": None} if "vocab_map" in arguments else {}  # which a group excludes
    return arguments | without_map | {"group": one_process(), "classes": classes}


def torch_operators() -> Any:
    import torch

    return torch.ops.liger


def step(op: str, arguments: dict[str, Any], backward: bool) -> list[Any]:
    """The results and the gradients."""
    import torch

    inputs = [t for t in tensors([*arguments.values()]) if t.requires_grad]
    with torch.set_grad_enabled(backward):
        if op.endswith("_"):  # it overwrites its arguments
            arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        results = [*tensors(getattr(torch_operators(), op)(**arguments))]
    differentiable = [t for t in results if t.requires_grad]
    if not differentiable:
        return results
    ones = [torch.ones_like(t) for t in differentiable]
    return [*results, *torch.autograd.grad(differentiable, inputs, ones, allow_unused=True)]


def digest(values: list[Any]) -> str:
    import torch

    sums = hashlib.sha256()
    for t in values:
        if t is not None:
            # NaN is one value, whatever its sign and payload.
            t = t.detach().clone(memory_format=torch.contiguous_format)
            t = t.nan_to_num(nan=12345.0) if t.is_floating_point() and t.element_size() > 1 else t
            sums.update(f"{t.dtype}{tuple(t.shape)}".encode() + bytes(t.reshape(-1).view(torch.uint8).tolist()))
    return sums.hexdigest()


def work() -> None:
    """Answers the lines of the other process."""
    import torch

    from liger_ops.reference import _calls as calls
    from liger_ops.reference import operators

    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = operators()
    current: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        name, *rest = json.loads(line)
        answer: Any = None
        if name == "operators":
            answer = [*found]
        elif name == "bits":
            operator, dtype = found[rest[0]], getattr(torch, rest[1])
            answer = {}
            for call in calls.calls(operator):
                arguments = with_group(rest[0], {k: converted(v, dtype) for k, v in call.arguments.items()})
                try:
                    answer[call.text] = digest(step(rest[0], arguments, True))
                except Exception as error:
                    answer[call.text] = f"{REFUSED}{error}"
        elif name == "prepare":
            op, size, dtype, backward = rest
            sizes = calls.SIZES | (LARGE if size == "large" else {})
            rows = LARGE_ROWS if size == "large" else calls.LEADING
            made = calls.call(found[op], calls.optional_tensors(found[op], {}), {}, sizes.__getitem__, rows)
            arguments = with_group(op, {k: converted(v, getattr(torch, dtype)) for k, v in made.items()})
            current = lambda: step(op, arguments, backward)  # noqa: E731
            try:
                start = time.perf_counter()
                for _ in range(3):
                    current()
                answer = (time.perf_counter() - start) / 3
            except Exception as error:
                answer = str(error)
        elif name == "run":
            start = time.perf_counter()
            for _ in range(rest[0]):
                current()
            answer = (time.perf_counter() - start) / rest[0]
        print(json.dumps(answer), flush=True)


# ---- Between two of them


class Worker:
    def __init__(self, checkout: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--work"], cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __call__(self, *request: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def ratio(ours: Worker, theirs: Worker, case: Case) -> float | None:
    """None for a call that both refuse."""
    prepared = [worker("prepare", *case) for worker in (ours, theirs)]
    if not isinstance(prepared[0], float) or not isinstance(prepared[1], float):
        if prepared[0] != prepared[1]:
            print(f"{case}: {prepared}")
        return None
    calls = max(1, round(TURN / prepared[1]))
    best = [math.inf, math.inf]
    for attempt in range(AGAIN):
        for turn in range(TURNS * 2**attempt):
            for index in (0, 1) if turn % 2 else (1, 0):
                best[index] = min(best[index], (ours, theirs)[index]("run", calls))
        if best[0] / best[1] <= (1 + SLOWER) / 2:
            break
    return best[0] / best[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_operators", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("other", type=Path)
    parser.add_argument("--ops", help="comma-separated; default: all")
    parser.add_argument("--bits", action="store_true", help="only compare the results")
    args = parser.parse_args()
    from benchmarks.__main__ import Progress

    checkouts = HERE.parent.parent, args.other.resolve()
    ours, theirs = map(Worker, checkouts)
    known, others = ours("operators"), theirs("operators")
    if alone := sorted({*known} ^ {*others}):
        print(f"not compared, because one checkout lacks them: {', '.join(alone)}")
    ops = args.ops.split(",") if args.ops else [op for op in others if op in known]
    different, refused, count = [], [], 0
    progress = Progress(4 * len(ops))
    for op in ops:
        for dtype in ("float64", *DTYPES):
            progress.tick(f"{op} {dtype}")
            pair = ours("bits", op, dtype), theirs("bits", op, dtype)
            count += len(pair[1])
            refused += [f"{op} {dtype} {call}: {text}" for call, text in pair[1].items() if text.startswith(REFUSED)]
            different += [f"{op} {dtype} {call}" for call in pair[1] if pair[0].get(call) != pair[1][call]]
    progress.close()
    print(f"{count} calls, of which OTHER refuses {len(refused)}", *refused, sep="\n  ")
    print(f"other bits in {len(different)} calls", *different, sep="\n  ")
    if args.bits:
        return bool(different)
    cases = [Case(op, size, d, b) for op in ops for size in ("large", "small") for d in DTYPES for b in (False, True)]
    progress = Progress(len(cases))
    ratios = {}
    for case in cases:
        progress.tick(str(case))
        if (found := ratio(ours, theirs, case)) is not None:
            ratios[case] = found
    progress.close()
    for _ in range(PROCESSES - 1):
        pair = tuple(map(Worker, checkouts))
        for case in [case for case, r in ratios.items() if r > SLOWER]:
            ratios[case] = min(ratios[case], ratio(*pair, case) or math.inf)
    for size in ("large", "small"):
        some = [r for case, r in ratios.items() if case.size == size]
        mean = math.exp(sum(map(math.log, some)) / len(some))
        print(f"{size} calls: {len(some)}, geometric mean {mean:.3f}, from {min(some):.2f} to {max(some):.2f}")
    slower = sorted(((r, case) for case, r in ratios.items() if r > SLOWER), reverse=True)
    print(f"slower than {SLOWER}: {len(slower)}", *(f"{r:.2f} {case}" for r, case in slower), sep="\n  ")
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    return mean > GEOMETRIC_MEAN or bool(slower) or bool(different)


if __name__ == "__main__":
    sys.exit(work() if "--work" in sys.argv else main())
