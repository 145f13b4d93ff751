"""`python -m liger_ops.demo`: the norms forward and backward beside eager PyTorch, on the best device there is.

Errors are the largest of the output's and the gradients', against the same formula in float64 and relative to it.
Times are medians of calls that take turns, so that a busy machine slows both sides.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Callable, NamedTuple, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import liger_ops

EPS = 1e-6


class Case(NamedTuple):
    name: str
    ours: Callable
    eager: Callable
    parameters: int  # how many vectors of n the op takes beside x


def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return F.rms_norm(s, weight.shape, weight, EPS), s


def cases() -> list[Case]:
    ops = torch.ops.liger
    return [
        Case("rms_norm", lambda x, w: ops.rms_norm(x, w, EPS), lambda x, w: F.rms_norm(x, w.shape, w, EPS), 1),
        Case("fused_add_rms_norm", lambda x, r, w: ops.fused_add_rms_norm(x, r, w, EPS), add_then_norm, 1),
        Case(
            "layer_norm",
            lambda x, w, b: ops.layer_norm(x, w, b, EPS),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
            2,
        ),
    ]


def inputs(case: Case, rows: int, n: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(rows, n)] * (2 if case.name.startswith("fused_add") else 1) + [(n,)] * case.parameters
    return [torch.randn(s, dtype=dtype, device=device, generator=generator).requires_grad_() for s in shapes]


def run(function: Callable, tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    out = function(*tensors)
    first = out[0] if isinstance(out, tuple) else out
    return [first.detach(), *torch.autograd.grad(first, tensors, upstream.to(first.dtype))]


def error(results: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(results, exact))


def times(functions: Sequence[Callable[[], object]], device: str, budget: float) -> list[float]:
    """Median seconds of each function, in rounds until the budget is spent."""

    def once(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for function in functions:
        once(function)
    end = time.perf_counter() + budget
    rounds: list[list[float]] = []
    while len(rounds) < 3 or (len(rounds) < 50 and time.perf_counter() < end):
        rounds.append([once(function) for function in functions])
    return [statistics.median(samples) for samples in zip(*rounds)]


def measure(case: Case, rows: int, n: int, dtype: torch.dtype, device: str, budget: float = 0.7) -> list[str]:
    tensors = inputs(case, rows, n, dtype, device)
    upstream = torch.randn(rows, n, dtype=dtype, device=device)
    exact = run(case.eager, [t.detach().double().requires_grad_() for t in tensors], upstream)
    liger_ops.reset_launch_counts()
    errors = [error(run(f, tensors, upstream), exact) for f in (case.ours, case.eager)]
    path = "+".join(p for p, count in liger_ops.launch_counts().items() if count)
    del exact
    plain = [t.detach() for t in tensors]
    both = (case.ours, case.eager)
    forward = times([lambda f=f: f(*plain) for f in both], device, budget)
    full = times([lambda f=f: run(f, tensors, upstream) for f in both], device, budget)
    shape, kind = f"{rows}x{n}", str(dtype).removeprefix("torch.")
    return [case.name, shape, kind, path, *(f"{e:.1e}" for e in errors), *(f"{t * 1e3:.2f}" for t in forward + full)]


def table(rows: list[list[str]]) -> str:
    head = ["op", "shape", "dtype", "path", "error", "eager", "forward ms", "eager", "full ms", "eager"]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(r, widths)).rstrip() for r in [head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m liger_ops.demo", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    device = parser.parse_args().device
    shapes = [(8192, 4096), (8192, 5120)] if device == "cuda" else [(2048, 4096), (1024, 2560)]
    jobs = [(c, s, d) for c in cases() for s in shapes for d in (torch.float32, torch.bfloat16)]
    rows = []
    for done, (case, shape, dtype) in enumerate(jobs, 1):
        rows.append(measure(case, *shape, dtype, device))
        filled = 30 * done // len(jobs)
        # On a terminal one line that fills; in a log a line each.
        start, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
        print(f"{start}[{'#' * filled}{'.' * (30 - filled)}] {case.name:20}", end=end, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"liger_ops {liger_ops.__version__} on {name}, torch {torch.__version__}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
