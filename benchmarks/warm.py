"""Compiles the cases of torch.compile before the run, in many processes: a case takes seconds, and a grid has hundreds.
The process that measures finds the results in Inductor's disk cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress

from benchmarks.harness import Case, Problem, Subject
from benchmarks.providers import discover, load

PROVIDER = "torch.compile"


def compile_case(name: str, shape: tuple[int, ...], dtype: str, device: str) -> None:
    """Compiles with and without gradients, as the run does. An error occurs again in the run, which reports it."""
    op = discover()[name]
    with suppress(Exception):
        problem = Problem(Case(name, op, shape, dtype), device)
        call = load(op, PROVIDER)
        problem.results(call)
        prepare, forward = Subject(problem, call).steps("forward")
        forward(prepare())


def compile_ahead(cases: Sequence[Case], device: str, jobs: int, tick: Callable[[str], None]) -> None:
    # Not a fork: this process may have threads and a CUDA context.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(compile_case, case.name, case.shape, case.dtype, device): case for case in cases}
        for task in as_completed(tasks):
            task.result()
            tick(f"compiled {tasks[task].name} {'×'.join(map(str, tasks[task].shape))}")
