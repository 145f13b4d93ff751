"""Compiles the cases of torch.compile ahead, in many processes: Inductor keeps what they compile in its cache on disk, where
the process that measures finds it. Compiling takes seconds a case, and a grid has hundreds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress

from benchmarks.harness import Case, Problem, Subject
from benchmarks.providers import discover, load

PROVIDER = "torch.compile"


def compile_case(name: str, shape: tuple[int, ...], dtype: str, device: str) -> None:
    """All graphs that measuring makes: with gradients and without. What fails here fails, and is reported, there."""
    op = discover()[name]
    with suppress(Exception):
        problem = Problem(Case(name, op, shape, dtype), device)
        call = load(op, PROVIDER)
        problem.results(call)
        prepare, forward = Subject(problem, call).steps("forward")
        forward(prepare())


def compile_ahead(cases: Sequence[Case], device: str, jobs: int, tick: Callable[[str], None]) -> None:
    # This process may have threads and a CUDA context, which a fork would carry along.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(compile_case, case.name, case.shape, case.dtype, device): case for case in cases}
        for task in as_completed(tasks):
            task.result()
            tick(f"compiled {tasks[task].name} {'×'.join(map(str, tasks[task].shape))}")
