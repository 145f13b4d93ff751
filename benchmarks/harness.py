"""Timing: in one process, all providers take turns in every round. A result is checked before it is timed.

A pass is "forward" (no grad), "backward" (its forward is not timed) or "full" (both). Device time is the time between
two events around one call, after a write that evicts the L2 cache. If the host needs longer to enqueue the call than the
write takes, the measured time includes host time. The full and the paper suite repeat the write to avoid that. Host cost
is measured separately, on a tensor so small that the device never falls behind.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import (
    MAX_SAMPLES,
    MIB,
    MIN_SAMPLES,
    WARMUP_CALLS,
    Clock,
    Record,
    measure_ceilings,
    measure_copies,
)
from benchmarks.op import Absent, Anchor, Bar, Make, Op, Relative, Shape
from benchmarks.providers import PathWitness, concerns, is_ours, load, reason
from liger_ops._accuracy import Roundings, compute_dtype, rounded

HOST_PASSES = ("no-grad", "grad", "fwd+bwd")
COLD_START_RUNS = 3
HOST_TURNS = 4  # per round: the speed of a host changes within seconds, so providers alternate often

Emit = Callable[[Record], None]


@dataclass(frozen=True)
class Case:
    name: str
    op: Op
    shape: Shape
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def key(self) -> Record:
        return {"op": self.name, "shape": list(self.shape), "dtype": self.dtype}


class WrongResult(Exception):
    """A provider's result is wrong, or less accurate than allowed; then both errors are given."""

    def __init__(self, reason: str, error: float | None = None, allowed: float | None = None) -> None:
        super().__init__(reason)
        self.record = {"reason": reason} if error is None else {"reason": reason, "error": error, "allowed": allowed}


class Unheld(torch.autograd.Function):
    """Copies a leaf into a tensor that only autograd references; passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def gradients_of(outputs: Any, leaves: Sequence[torch.Tensor], upstream: Any, **options: Any) -> tuple[Any, ...]:
    """Of an op without gradients, none."""
    return torch.autograd.grad(outputs, leaves, upstream, **options) if leaves else ()


class Problem:
    """Inputs and upstream gradients of a case, the fp64 reference, and the errors of eager code in the case's dtype."""

    def __init__(self, case: Case, device: str, upstream: Callable[..., torch.Tensor] = torch.randn) -> None:
        self.case = case
        make = Make(device, case.torch_dtype)
        inputs = case.op.inputs(make, *case.shape)
        self.takes_gradient = [t.is_floating_point() and k not in case.op.constants for k, t in inputs.items()]
        self.transient = [k in case.op.transient for k in inputs]
        self.slack = 0.0
        self.tensors = [t.requires_grad_(g) for t, g in zip(inputs.values(), self.takes_gradient)]
        self.names = [f"d {k}" for k, g in zip(inputs, self.takes_gradient) if g]
        outputs = as_tuple(case.op.formula(*(t.detach().to("meta") for t in self.tensors)))
        random = {"generator": make.generator} if upstream is torch.randn else {}
        self.upstream = [
            upstream(o.shape, device=device, dtype=o.dtype, **random)
            if o.is_floating_point()
            else torch.ones(o.shape, device=device, dtype=o.dtype)
            for o in outputs
        ]
        self.pristine = [t.detach().clone() for t in (*self.tensors, *self.upstream)]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [t for t in self.tensors if t.requires_grad]

    def restore(self) -> None:
        """Undoes the writes of providers that change their inputs or the upstream gradient."""
        with torch.no_grad():
            for tensor, value in zip((*self.tensors, *self.upstream), self.pristine):
                tensor.copy_(value)

    def arguments(self) -> list[torch.Tensor]:
        return [Unheld.apply(t) if hide else t for t, hide in zip(self.tensors, self.transient)]

    def results(self, call: Callable[..., Any]) -> list[torch.Tensor]:
        """Outputs, then gradients."""
        outputs = as_tuple(call(*self.arguments()))
        kept = [o.detach().clone() for o in outputs]
        return [*kept, *gradients_of(outputs, self.leaves, self.upstream)]

    def learn_truth(self) -> None:
        op = self.case.op
        exact = [t.detach().double() if t.is_floating_point() else t for t in self.tensors]
        exact = [e.requires_grad_(t.requires_grad) for e, t in zip(exact, self.tensors)]
        upstream = [g.double() for g in self.upstream]

        def results_of(inputs: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            outputs = as_tuple(op.formula(*inputs))
            gradients = gradients_of(outputs, [t for t in inputs if t.requires_grad], upstream)
            return [t.detach() for t in (*outputs, *gradients)]

        def results_of_rounded(draw: int) -> list[torch.Tensor]:
            changed = rounded([*self.tensors, *self.upstream], precision, draw)
            return results_of(changed[: len(self.tensors)], changed[len(self.tensors) :])

        precision = compute_dtype(self.tensors)
        self.truth = results_of(exact, upstream)
        self.bounds = Roundings(self.truth, results_of_rounded, self.tensors, precision)
        eager = self.checked_results(op.formula)
        self.dtypes = [t.dtype for t in eager]
        self.eager_errors = self.errors(eager)
        if self.case.op.averaged:
            count = self.case.op.averaged(*self.case.shape)
            self.slack = torch.finfo(self.case.torch_dtype).eps / math.sqrt(count)
        if "torch" in op.providers:
            with suppress(Exception):  # reported when this provider is checked
                aten = self.checked_results(op.providers["torch"]())
                for i, error in enumerate(self.errors(aten)):
                    if aten[i].dtype == self.dtypes[i] and error <= self.other_function:
                        self.eager_errors[i] = max(error, self.eager_errors[i])

    @property
    def other_function(self) -> float:
        """Larger errors than half the digits of the dtype do not come from rounding: the result is wrong."""
        return math.sqrt(torch.finfo(self.case.torch_dtype).eps)

    def forget_truth(self) -> None:
        self.truth = []
        del self.bounds

    def errors(self, results: Sequence[torch.Tensor]) -> list[float]:
        return [worst_error(got, truth) for got, truth in zip(results, self.truth)]

    def error_records(self, provider: str, results: Sequence[torch.Tensor]) -> list[Record]:
        key = {"kind": "error", **self.case.key, "provider": provider}
        errors = [relative_error(got, truth) for got, truth in zip(results, self.truth)]
        return [{**key, "pass": self.name_of(i), **summary([error])} for i, error in enumerate(errors)]

    def checked_results(self, call: Callable[..., Any]) -> list[torch.Tensor]:
        """Outputs, then gradients, of the right number and shapes."""
        self.restore()
        # Fills blocks of the allocator with NaN, so that an element that is never written is found.
        poison = [torch.full_like(t, math.nan, dtype=self.case.torch_dtype) for t in self.truth]
        del poison
        results = self.results(call)
        self.restore()
        for i, (got, truth) in enumerate(zip(results, self.truth, strict=True)):
            if got.shape != truth.shape:
                raise WrongResult(f"{self.name_of(i)} has shape {tuple(got.shape)} (expected {tuple(truth.shape)})")
        return results

    def name_of(self, index: int) -> str:
        outputs = len(self.upstream)
        return f"output {index}" if index < outputs else self.names[index - outputs]

    def check(self, results: Sequence[torch.Tensor], strict: bool) -> list[WrongResult]:
        """Raises on a wrong result. A less accurate result than eager code raises if `strict`, else it is returned."""
        complaints = []
        for i, (error, eager, dtype) in enumerate(zip(self.errors(results), self.eager_errors, self.dtypes)):
            # As in the tests: 1.5 times the error of eager code, and one rounding. Eager's error may be small by chance.
            rounding = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
            allowed = 1.5 * eager + rounding + (self.slack if i < len(self.upstream) else 0.0)
            if error > allowed:
                allowed += self.bounds.bound(i, worst_error)
            if not error <= allowed:
                wrong = not error <= self.other_function
                verdict = "is wrong" if wrong else "is less accurate than eager code"
                complaints.append(WrongResult(f"{self.name_of(i)} {verdict}", error, allowed))
                if strict or wrong:
                    raise complaints[-1]
        return complaints


def worst_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest error of any element, relative to the largest element of its row, so that one wrong row is found."""
    if truth.numel() == 0:
        return 0.0
    scale = truth.abs().amax(-1, keepdim=True) if truth.dim() else truth.abs()
    return ((got.double() - truth).abs() / scale.clamp_min(torch.finfo(torch.float64).tiny)).max().item()


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """|got - truth| / |truth| in the Euclidean norm of the whole tensor."""
    return ((got.double() - truth).norm() / truth.norm()).item()


class Subject:
    """The steps of one provider on a problem, by pass."""

    def __init__(self, problem: Problem, call: Callable[..., Any]) -> None:
        self.problem, self.call = problem, call

    def steps(self, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """(the untimed step, the timed step)"""
        problem, call = self.problem, self.call
        leaves, upstream = problem.leaves, problem.upstream

        def forward(arguments: list[torch.Tensor]) -> Any:
            with torch.no_grad():
                return call(*arguments)

        def graph(arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            outputs = as_tuple(call(*arguments))
            arguments.clear()  # now only the graph references transient inputs
            return outputs

        def backward(outputs: tuple[torch.Tensor, ...]) -> Any:
            # A provider that does only a part of the work may leave some out.
            return gradients_of(outputs, leaves, upstream, allow_unused=True)

        return {
            "forward": (problem.arguments, forward),
            "backward": (lambda: graph(problem.arguments()), backward),
            "full": (problem.arguments, lambda arguments: backward(graph(arguments))),
        }[name]

    def host_step(self, name: str) -> Callable[[], Any]:
        call, tensors, leaves = self.call, self.problem.tensors, self.problem.leaves
        upstream = self.problem.upstream
        if name == "fwd+bwd":
            return lambda: gradients_of(call(*tensors), leaves, upstream)
        return lambda: call(*tensors)


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round, balanced: after len(names) rounds (twice as many if odd), each name has followed every other
    equally often. So no provider profits from the power, clock or cache state that its predecessor leaves."""
    # Williams' square: neighbors in the first row have every distance once, and each later row is shifted by one.
    count = len(names)
    first = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]
    ordered = [names[(place + turn) % count] for place in first]
    return ordered[::-1] if count % 2 and turn // count % 2 else ordered


@contextmanager
def no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def summary(values: Sequence[float]) -> Record:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "q1": q1, "q3": q3, "samples": len(values)}


def judge(
    kind: str, case: Case, records: Sequence[Record], must: Mapping[str, Bar], provider: str = "ours"
) -> list[Record]:
    """Compares ours with the limit of each pass. "within spread": only the lower quartile meets it."""
    bars = []
    for pass_name, bar in must.items():
        here = {r["provider"]: r for r in records if r["pass"] == pass_name}
        ours = here.get(provider)
        limit: float | None
        if isinstance(bar, Relative):
            peers = [here[p]["median"] for p in bar.providers if p in here]
            limit = bar.factor * min(peers) if peers else None
        else:
            limit = float(bar)
        if ours is None:
            verdict = "NOT MEASURED"
        elif limit is None:
            verdict = "nothing to compare with"
        elif ours["median"] <= limit:
            verdict = "pass"
        else:
            verdict = "within spread" if ours["q1"] <= limit else "FAIL"
        source = "" if isinstance(bar, (int, float)) else str(bar)
        bars.append({"kind": "bar", "of": kind, **case.key, "provider": provider, "pass": pass_name, "must": limit,
                     "from": source, "verdict": verdict})  # fmt: skip
    return bars


def judge_errors(case: Case, records: Sequence[Record]) -> list[Record]:
    ours = dict.fromkeys(r["provider"] for r in records if is_ours(r["provider"]))
    return [bar for provider in ours for bar in judge("error", case, records, case.op.must_error, provider)]


class Runner:
    def __init__(
        self, clock: Clock, suite: str, providers: Sequence[str], rounds: int, emit: Emit, tick: Callable[[str], None]
    ) -> None:
        self.clock, self.suite, self.providers = clock, suite, providers
        self.rounds, self.emit, self.tick = rounds, emit, tick
        self.ceiling: Record = {}
        gc.freeze()  # later collections skip the objects of the imports

    def measure_ceilings(self, with_matmul: bool) -> None:
        self.ceiling = measure_ceilings(self.clock, with_matmul)
        self.emit(self.ceiling)
        if self.suite == "full":
            self.emit(measure_copies(self.clock))

    def floors(self, case: Case) -> dict[str, float]:
        """Microseconds for the bytes at the copy bandwidth, or for the operations at the GEMM rate if that is longer."""
        bytes_moved = case.op.traffic(case.torch_dtype.itemsize, *case.shape)
        floor = [b / self.ceiling["copy_gb_s"] / 1e3 for b in bytes_moved]
        if case.op.flops:
            arithmetic = [o / self.ceiling["matmul_tflop_s"] / 1e6 for o in case.op.flops(*case.shape)]
            floor = [max(pair) for pair in zip(floor, arithmetic)]
        return {"forward": floor[0], "backward": floor[1], "full": sum(floor)}

    def prepare(self, case: Case, kind: str) -> tuple[Problem, dict[str, Subject], dict[str, PathWitness]]:
        """The providers that work and are right on this case. For the others a record gives the reason."""
        op = case.op
        smaller = replace(case, shape=op.checked(*case.shape)) if op.checked else case
        problem = Problem(smaller, self.clock.device)
        problem.learn_truth()
        calls, witnesses, errors = {}, {}, []
        asked = op.asked.get(self.suite, self.providers)
        for name in (p for p in self.providers if concerns(op, p)):
            self.tick(f"{case.name} {'×'.join(map(str, case.shape))} {case.dtype}: checking {name}")
            with self.guard(case, kind, name):
                if name not in asked:
                    raise Absent("not part of this suite")
                call = load(op, name)
                witness = PathWitness(name, self.clock.device)
                if name != op.floor and name not in op.unchecked:
                    results = problem.checked_results(call)
                    if op.checked:
                        errors += problem.error_records(name, results)
                    for complaint in problem.check(results, strict=is_ours(name)):
                        self.emit({"kind": "inaccurate", "of": kind, **case.key, "provider": name, **complaint.record})
                    del results
                    witness.look()
                calls[name], witnesses[name] = call, witness
        for record in (*errors, *judge_errors(smaller, errors)):
            self.emit(record)
        problem.forget_truth()
        if op.checked:
            del problem
            self.clock.release()
            problem = Problem(case, self.clock.device, torch.ones)
        self.clock.release()
        return problem, {name: Subject(problem, call) for name, call in calls.items()}, witnesses

    @contextmanager
    def guard(self, case: Case, kind: str, name: str, subjects: dict[str, Subject] | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if subjects is not None:
                subjects.pop(name, None)
            wrong = isinstance(error, WrongResult)
            state = "wrong" if wrong else "absent" if isinstance(error, Absent) else "crashed"
            why = error.record if wrong else {"reason": reason(error)}
            self.emit({"kind": "absent", "of": kind, **case.key, "provider": name, "state": state, **why})

    def time(self, case: Case, anchors: Sequence[Anchor]) -> None:
        times: list[Record] = []
        memory: list[Record] = []
        with self.guard(case, "time", "every provider"):
            times, memory = self.time_subjects(case, *self.prepare(case, "time"))
        bars = []
        for anchor in anchors:
            bars += judge("time", case, times, anchor.must, anchor.provider)
            bars += judge("memory", case, memory, anchor.must_mib, anchor.provider)
        for record in (*times, *memory, *bars):
            self.emit(record)

    def time_subjects(
        self, case: Case, problem: Problem, subjects: dict[str, Subject], witnesses: dict[str, PathWitness]
    ) -> tuple[list[Record], list[Record]]:
        passes = case.op.passes
        times: dict[tuple[str, str], list[float]] = {}
        peaks: dict[tuple[str, str], int] = {}
        counts: dict[tuple[str, str], int] = {}
        for name in list(subjects):
            with self.guard(case, "time", name, subjects):
                for pass_name in passes:
                    prepare, call = subjects[name].steps(pass_name)
                    with no_collection():
                        self.clock.samples(prepare, call, 1)
                        start = time.perf_counter()
                        self.clock.samples(prepare, call, WARMUP_CALLS)
                        cost = (time.perf_counter() - start) / WARMUP_CALLS
                        count = int(self.clock.seconds_a_round / cost)
                        counts[name, pass_name] = min(MAX_SAMPLES, max(MIN_SAMPLES, count))
                        problem.restore()
                        peaks[name, pass_name] = self.clock.peak_bytes(prepare, call)
        for turn in range(self.rounds):
            self.tick(f"{case.name} {'×'.join(map(str, case.shape))} {case.dtype}: round {turn + 1}")
            for name in in_turn(list(subjects), turn):
                with self.guard(case, "time", name, subjects), no_collection():
                    for pass_name in passes:
                        problem.restore()
                        steps = subjects[name].steps(pass_name)
                        samples = self.clock.samples(*steps, counts[name, pass_name])
                        times.setdefault((name, pass_name), []).extend(samples)
        floors = self.floors(case)
        moved = {} if case.op.flops else {p: floors[p] * self.ceiling["copy_gb_s"] * 1e3 for p in passes}
        floors |= {p: statistics.median(times[case.op.floor, p]) for p in passes if case.op.floor in subjects}
        least = {}
        if case.op.gradients:
            least = {"full": {"least": case.op.gradients(case.torch_dtype.itemsize, *case.shape) / MIB}}
        paths = self.paths(case, "time", subjects, witnesses)
        records, memory = [], []
        for name in subjects:
            for pass_name in passes:
                key = {**case.key, "provider": name, "pass": pass_name, "path": paths[name]}
                records.append({"kind": "time", "unit": "us", **key, **summary(times[name, pass_name]),
                                "floor": floors[pass_name], "bytes": moved.get(pass_name)})  # fmt: skip
                memory.append({"kind": "memory", "unit": "MiB", **key, **summary([peaks[name, pass_name] / MIB]),
                               **least.get(pass_name, {})})  # fmt: skip
        return records, memory

    def host(self, name: str, op: Op, must: bool) -> None:
        spec = op.host[self.clock.device]
        case = Case(name, op, spec.shape, spec.dtype)
        records: list[Record] = []
        with self.guard(case, "host", "every provider"):
            records = self.host_subjects(case, *self.prepare(case, "host"))
        for record in (*records, *judge("host", case, records, spec.must if must else {})):
            self.emit(record)

    def host_subjects(
        self, case: Case, problem: Problem, subjects: dict[str, Subject], witnesses: dict[str, PathWitness]
    ) -> list[Record]:
        costs: dict[tuple[str, str], list[float]] = {}
        for turn in range(HOST_TURNS * self.rounds):
            self.tick(f"{case.name}: host cost, turn {turn + 1}")
            for provider in in_turn(list(subjects), turn):
                with self.guard(case, "host", provider, subjects), no_collection():
                    problem.restore()
                    for pass_name in HOST_PASSES:
                        step = subjects[provider].host_step(pass_name)
                        with torch.set_grad_enabled(pass_name != "no-grad"):
                            self.host_batch(step, 10)
                            costs.setdefault((provider, pass_name), []).append(
                                self.host_batch(step, self.clock.host_batch)
                            )
        paths = self.paths(case, "host", subjects, witnesses)
        return [
            {"kind": "host", "unit": "us", **case.key, "provider": provider, "pass": pass_name, "path": paths[provider],
             **summary(costs[provider, pass_name])}
            for provider in subjects for pass_name in HOST_PASSES
        ]  # fmt: skip

    def host_batch(self, step: Callable[[], Any], count: int) -> float:
        """Microseconds to enqueue one call."""
        self.clock.synchronize()
        start = time.perf_counter_ns()
        for _ in repeat(None, count):
            step()
        elapsed = time.perf_counter_ns() - start
        self.clock.synchronize()
        return elapsed / count / 1e3

    def paths(
        self, case: Case, kind: str, subjects: dict[str, Subject], witnesses: Mapping[str, PathWitness]
    ) -> dict[str, str]:
        paths = {}
        for name in list(subjects):
            with self.guard(case, kind, name, subjects):
                paths[name] = witnesses[name].look()
        return paths

    def cold_start(self, name: str, op: Op) -> None:
        spec = op.host[self.clock.device]
        case = Case(name, op, spec.shape, spec.dtype)
        records = []
        for provider in (p for p in op.cold_start if p in self.providers):
            with self.guard(case, "cold start", provider):
                seconds = []
                for run in range(COLD_START_RUNS):
                    self.tick(f"{name}: cold start of {provider}, {run + 1} of {COLD_START_RUNS}")
                    seconds.append(cold_start_seconds(name, provider, self.clock.device))
                records.append({"kind": "cold start", "unit": "s", **case.key, "provider": provider,
                                "pass": "first step", "path": "", **summary(seconds)})  # fmt: skip
        bar = op.cold_start_must.get(self.clock.device)
        for record in (*records, *judge("cold start", case, records, {} if bar is None else {"first step": bar})):
            self.emit(record)


def cold_start_seconds(name: str, provider: str, device: str) -> float:
    """From the import of a provider to its first finished step, in a separate process with empty caches."""
    with tempfile.TemporaryDirectory() as empty:
        caches = ("LIGER_OPS_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
        environment = os.environ | {v: os.path.join(empty, v) for v in caches}
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.cold_start", name, provider, device],
            env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    if run.returncode:
        error, _, message = (run.stderr.strip().splitlines() or ["no output"])[-1].partition(": ")
        raise Absent(message) if error == "benchmarks.op.Absent" else RuntimeError(message or error)
    return float(run.stdout.split()[-1])
