"""Errors of log-probabilities beside their times: ours, liger-kernel's kernel for compute capability 9.0 where it runs, 16-bit
logits with an exact softmax, and the GEMMs alone.

    python -m benchmarks.exact_log_probs --out DIR [--shape 8192x4096x131072 ...]

The shape is tokens, hidden size and classes; logits have a standard deviation of 2. Errors are those against fp64, of the first
1024 tokens. For gradients, logits have a standard deviation of 10 and ids are the likeliest: errors of d input, relative to the
token's largest, of tokens whose largest is at least 1e-3. The GEMM writes 4096 tokens at a time into one buffer. Writes exact-log-probs.jsonl and .md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import add_out, positive, shape_of
from benchmarks.clock import MIB, CpuClock, CudaClock
from benchmarks.linear_log_probs import liger_kernel
from benchmarks.machine import describe, slug
from benchmarks.pages import grid
from liger_ops import functional as F

SHAPES = {"cuda": [(8192, 4096, 131072), (8192, 4096, 151936)], "cpu": [(64, 32, 512)]}
CHUNK, CHECKED = 4096, 1024
PEER = "liger-kernel"
# GEMMs of each call.
GEMMS = {"forward": 1, "with all facts": 1, "trained": 4, "head frozen": 2}

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.fused_linear_log_probs(x, weight, target).log_probs


def providers() -> dict[str, LogProbs]:
    found: dict[str, LogProbs] = {"ours": ours}
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return found
    with suppress(ImportError):
        importlib.import_module("cutlass")  # else it runs other code
        found[PEER] = liger_kernel()
    return found


def eager(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) from logits in the dtype of x, whose softmax is in fp32."""
    logs = (x @ weight.t()).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def gradient_errors(x: Tensor, weight: Tensor, named: dict[str, LogProbs]) -> dict[str, float]:
    x, target = 5 * x, (x @ weight.t()).argmax(-1)

    def slope(run: LogProbs, dtype: torch.dtype, trained: bool = True) -> Tensor:
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        run(leaf, weight.detach().to(dtype).requires_grad_(trained), target).sum().backward()
        return leaf.grad.double()

    def by_eager(*given: Tensor) -> Tensor:
        return eager(*given)[0]

    exact = slope(by_eager, torch.float64, False)
    largest = exact.abs().amax(-1)
    found = {name: slope(run, x.dtype) for name, run in named.items()}
    found |= {"head frozen": slope(ours, x.dtype, False), "16-bit logits": slope(by_eager, x.dtype, False)}
    return {name: float(((g - exact).abs().amax(-1) / largest)[largest > 1e-3].max()) for name, g in found.items()}


def measure(shape: tuple[int, ...], device: str, rounds: int) -> dict[str, Any]:
    tokens, hidden, classes = shape
    clock = CudaClock() if device == "cuda" else CpuClock()
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    weight = (2 * hidden**-0.5 * torch.randn(classes, hidden, device=device)).bfloat16()
    target = torch.randint(classes, (tokens,), device=device)
    buffer = torch.empty(min(tokens, CHUNK), classes, device=device, dtype=x.dtype)

    def gemm() -> None:
        for part in x.split(CHUNK):
            torch.mm(part, weight.t(), out=buffer[: len(part)])

    def step(of: LogProbs, trained: bool) -> Callable[[], None]:
        leaves = x.clone().requires_grad_(), weight.detach().requires_grad_(trained)

        def run() -> None:
            of(*leaves, target).sum().backward()
            for leaf in leaves:
                leaf.grad = None

        return run

    named = providers()
    calls: dict[str, Callable[[], Any]] = {
        "gemm": gemm,
        "with all facts": lambda: F.fused_linear_log_probs(
            x, weight, target, entropy=True, mean_logits=True, log_sum_sq_probs=True, is_top1=True
        ),
    }
    for name, of in named.items():
        by = "" if of is ours else f"{name}, "
        calls[by + "forward"] = lambda of=of: of(x, weight, target)
        calls |= {by + "trained": step(of, True), by + "head frozen": step(of, False)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):  # the first warms up
        for name, call in calls.items():
            found = clock.samples(lambda: None, lambda _, call=call: call(), 1)
            times[name] += found if i else []
    peak = clock.peak_bytes(lambda: None, lambda _: calls["forward"]())
    few = x[:CHECKED], weight, target[:CHECKED]
    facts = F.fused_linear_log_probs(*few, entropy=True)
    exact = eager(few[0].double(), weight.double(), few[2])
    found = {"ours": (facts.log_probs, facts.entropy), "16-bit logits": eager(*few)}
    found |= {name: (of(*few),) for name, of in named.items() if of is not ours}
    errors = {}
    for name, results in found.items():
        gaps = [(mine - truth).abs() for mine, truth in zip(results, exact)]
        errors[name] = [
            float(gaps[0].max()),
            float(gaps[0].square().mean().sqrt()),
            *map(float, map(torch.max, gaps[1:])),
        ]
    medians = {name: statistics.median(found) / 1e3 for name, found in times.items()}
    slopes = gradient_errors(few[0], weight, named)
    return {"kind": "exact", "shape": shape, "ms": medians, "peak": peak, "errors": errors, "gradients": slopes}


def page(records: list[dict[str, Any]]) -> str:
    rows = []
    for r in records:
        ms, gemm = r["ms"], r["ms"]["gemm"]
        for name, errors in r["errors"].items():
            by = "" if name == "ours" else f"{name}, "
            of = {call: ms[by + call] for call in GEMMS if by + call in ms}
            cells = [
                f"{of[call]:.2f} ({of[call] / count / gemm:.3f})" if call in of else "" for call, count in GEMMS.items()
            ]
            slope = f"{r['gradients'][name]:.1e}"
            slope += f" / {r['gradients']['head frozen']:.1e}" * (name == "ours")
            shape = ["×".join(map(str, r["shape"])), f"{gemm:.2f}"] if name == "ours" else ["", ""]
            peak = f"{r['peak'] / MIB:.0f}" if name == "ours" else ""
            rows.append([*shape, name, *cells, peak, " / ".join(f"{e:.1e}" for e in errors), slope])
    header = ["shape", "GEMM, ms", "", "forward (of GEMM)", "all facts", "trained (of 4)", "head frozen (of 2)", "MiB"]
    return grid([*header, "log p, rms, entropy", "d input (head frozen)"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    parser.add_argument("--device", choices=SHAPES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", type=shape_of, action="append")
    parser.add_argument("--rounds", type=positive, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    machine = describe(options.device)
    records = [measure(shape, options.device, options.rounds) for shape in options.shape or SHAPES[options.device]]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"{slug(options.device)}-exact-log-probs"
    lines = "".join(json.dumps(record) + "\n" for record in [machine, *records])
    stem.with_suffix(".jsonl").write_text(lines)
    text = page(records)
    stem.with_suffix(".md").write_text(f"# Log-probabilities: errors beside times\n\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
