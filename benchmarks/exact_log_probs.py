"""Errors of log-probabilities beside their times: ours, 16-bit logits with an exact softmax, and the GEMMs alone.

    python -m benchmarks.exact_log_probs --out DIR [--shape 8192x4096x131072 ...]

The shape is tokens, hidden size and classes; logits have a standard deviation of 2. Errors are those against fp64, of the first
1024 tokens. For gradients, logits have a standard deviation of 10 and ids are the likeliest: errors of d input, relative to the
token's largest, of tokens whose largest is at least 1e-3. The GEMM writes 4096 tokens at a time into one buffer. Writes exact-log-probs.jsonl and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import add_out, positive, shape_of
from benchmarks.clock import MIB, CpuClock, CudaClock
from benchmarks.machine import describe, slug
from benchmarks.pages import grid
from liger_ops import functional as F

SHAPES = {"cuda": [(8192, 4096, 131072), (8192, 4096, 151936)], "cpu": [(64, 32, 512)]}
CHUNK, CHECKED = 4096, 1024


def eager(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) from logits in the dtype of x, whose softmax is in fp32."""
    logs = (x @ weight.t()).to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)
    return logs.gather(-1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


def gradient_errors(x: Tensor, weight: Tensor) -> dict[str, float]:
    x, target = 5 * x, (x @ weight.t()).argmax(-1)

    def slope(run: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, trained: bool = False) -> Tensor:
        leaf = x.detach().to(dtype, copy=True).requires_grad_()
        run(leaf, weight.detach().to(dtype).requires_grad_(trained)).sum().backward()
        return leaf.grad.double()

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return F.fused_linear_log_probs(x, weight, target).log_probs

    exact = slope(lambda x, w: eager(x, w, target)[0], torch.float64)
    largest = exact.abs().amax(-1)
    found = {
        "ours": slope(ours, x.dtype, True),
        "head frozen": slope(ours, x.dtype),
        "16-bit logits": slope(lambda x, w: eager(x, w, target)[0], x.dtype),
    }
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

    def step(trained: bool) -> Callable[[], None]:
        leaves = x.clone().requires_grad_(), weight.detach().requires_grad_(trained)

        def run() -> None:
            F.fused_linear_log_probs(*leaves, target).log_probs.sum().backward()
            for leaf in leaves:
                leaf.grad = None

        return run

    calls = {
        "gemm": gemm,
        "forward": lambda: F.fused_linear_log_probs(x, weight, target),
        "with all facts": lambda: F.fused_linear_log_probs(
            x, weight, target, entropy=True, mean_logits=True, log_sum_sq_probs=True, is_top1=True
        ),
        "trained": step(True),
        "head frozen": step(False),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):  # the first warms up
        for name, call in calls.items():
            found = clock.samples(lambda: None, lambda _, call=call: call(), 1)
            times[name] += found if i else []
    peak = clock.peak_bytes(lambda: None, lambda _: calls["forward"]())
    few = x[:CHECKED], weight, target[:CHECKED]
    ours = F.fused_linear_log_probs(*few, entropy=True)
    exact = eager(few[0].double(), weight.double(), few[2])
    errors = {}
    for name, results in {"ours": (ours.log_probs, ours.entropy), "16-bit logits": eager(*few)}.items():
        gaps = [(mine - truth).abs() for mine, truth in zip(results, exact)]
        errors[name] = [float(gaps[0].max()), float(gaps[0].square().mean().sqrt()), float(gaps[1].max())]
    medians = {name: statistics.median(found) / 1e3 for name, found in times.items()}
    slopes = gradient_errors(few[0], weight)
    return {"kind": "exact", "shape": shape, "ms": medians, "peak": peak, "errors": errors, "gradients": slopes}


def page(records: list[dict[str, Any]]) -> str:
    rows = []
    for r in records:
        ms, gemm = r["ms"], r["ms"]["gemm"]
        gemms = {"forward": 1, "with all facts": 1, "trained": 4, "head frozen": 2}
        cells = [f"{ms[name]:.2f} ({ms[name] / count / gemm:.3f})" for name, count in gemms.items()]
        errors = [" / ".join(f"{e:.1e}" for e in r["errors"][name]) for name in ("ours", "16-bit logits")]
        slopes = " / ".join(f"{e:.1e}" for e in r["gradients"].values())
        rows.append(["×".join(map(str, r["shape"])), f"{gemm:.2f}", *cells, f"{r['peak'] / MIB:.0f}", *errors, slopes])
    header = ["shape", "GEMM, ms", "forward (of GEMM)", "all facts", "trained (of 4)", "head frozen (of 2)", "MiB"]
    header += ["ours: log p, rms, entropy", "16-bit logits", "d input: ours, head frozen, 16-bit logits"]
    return grid(header, rows)


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
