"""`python -m liger_ops.demo`: trains a small Llama on this package's own files, without and with the operators.

It learns byte by byte. Both runs start from the same weights and see the same batches, each in its own process. They
take turns, step by step, so that changes in the machine's speed affect both. A table compares the runs, and a picture
shows their loss curves and peak memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import liger_ops

SUFFIXES = (".py", ".md", ".cpp", ".h", ".txt", ".toml")
NAMES = {"plain": "transformers", "liger": "with liger_ops"}


class Size(NamedTuple):
    hidden: int
    layers: int
    heads: int
    batch: int
    length: int
    steps: int


SIZES = {
    "tiny": Size(hidden=64, layers=2, heads=4, batch=4, length=64, steps=8),
    "small": Size(hidden=128, layers=3, heads=4, batch=8, length=128, steps=250),
    "medium": Size(hidden=768, layers=12, heads=12, batch=16, length=1024, steps=100),
    "large": Size(hidden=2048, layers=16, heads=16, batch=8, length=2048, steps=100),
}


# ---- One run


def text() -> bytes:
    """The package's files; in a checkout, also the documentation and the C++ sources."""
    package = Path(__file__).parent
    files = set(package.rglob("*"))
    if (package.parent / "pyproject.toml").exists():
        files |= set(package.parent.glob("*.md")) | set((package.parent / "csrc").rglob("*"))
    return b"\n".join(path.read_bytes() for path in sorted(files) if path.suffix in SUFFIXES)


def build(size: Size, device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    return model.to(torch.bfloat16) if device == "cuda" else model


def batches(data: bytes, size: Size, device: str) -> list[torch.Tensor]:
    draw = random.Random(0)
    corpus = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    starts = [[draw.randrange(len(corpus) - size.length) for _ in range(size.batch)] for _ in range(size.steps)]
    return [torch.stack([corpus[s : s + size.length] for s in row]).long().to(device) for row in starts]


def resident(field: str) -> int:
    """Bytes of memory that this process uses now (VmRSS), or used at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


def progress(done: int, total: int, label: str) -> None:
    filled = 30 * done // total
    bar = f"[{'#' * filled}{'.' * (30 - filled)}] {label}"
    # One progress bar on a terminal; about ten lines in a log.
    if sys.stderr.isatty():
        print(f"\r{bar:79}", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done % max(total // 10, 1) == 0:
        print(bar, file=sys.stderr, flush=True)


def train(run: str, size: Size, device: str, compiled: bool) -> dict[str, Any]:
    model, data = build(size, device), batches(text(), size, device)
    report = None
    if run == "liger":
        from liger_ops.transformers import apply_liger_kernel

        report = str(apply_liger_kernel(model))
    # Settings for stable training: unstable training would amplify rounding differences.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if size.hidden < 512 else 3e-4, eps=1e-6)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=max(1, size.steps // 10))
    forward = torch.compile(model) if compiled else model
    before = torch.cuda.memory_allocated() if device == "cuda" else resident("VmRSS")
    liger_ops.reset_launch_counts()
    losses, seconds = [], []
    for ids in data:
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("demo: the other run ended")
        start = time.perf_counter()
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        print(losses[-1], flush=True)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")
    return {
        "run": run,
        "losses": losses,
        "tokens_per_second": size.batch * size.length / statistics.median(seconds[1:]),
        "first_step_seconds": seconds[0],
        "peak_bytes": peak - before,
        "launches": {path: count for path, count in liger_ops.launch_counts().items() if count},
        "report": report,
    }


# ---- Both


class RunProcess:
    """One run in a separate process, so that its memory is measured separately."""

    def __init__(self, run: str, arguments: argparse.Namespace) -> None:
        self.run = run
        command = [sys.executable, "-m", "liger_ops.demo", "--run", run, "--device", arguments.device]
        command += ["--model-size", arguments.model_size, *(["--compile"] if arguments.compile else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def line(self) -> str:
        line = self.stdout.readline()
        if not line:
            raise SystemExit(f"demo: the run {NAMES[self.run]} ended with exit code {self.process.wait()}")
        return line

    def step(self) -> float:
        self.stdin.write("\n")
        self.stdin.flush()
        return float(self.line())


def run_in_turns(steps: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    runs = [RunProcess(run, arguments) for run in NAMES]
    for i in range(1, steps + 1):
        # Wait until both are ready: one may still be starting.
        for run in runs:
            run.line()
        losses = " and ".join(f"{run.step():.3f}" for run in runs)
        progress(i, steps, f"step {i}, losses {losses}")
    return [json.loads(run.line()) for run in runs]


def table(results: list[dict[str, Any]]) -> str:
    lines = [["", "tokens/s", "peak memory", "first step", "first loss", "last loss", "launches"]]
    for r in results:
        launches = ", ".join(f"{count} {path}" for path, count in r["launches"].items()) or "none"
        lines.append([
            NAMES[r["run"]], f"{r['tokens_per_second']:.0f}", f"{r['peak_bytes'] / 2**20:.0f} MiB",
            f"{r['first_step_seconds']:.2f} s", f"{r['losses'][0]:.4f}", f"{r['losses'][-1]:.4f}", launches,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths)).rstrip() for line in lines)


def largest_difference(results: list[dict[str, Any]]) -> float:
    return max(abs(a - b) for a, b in zip(*(r["losses"] for r in results)))


def draw(results: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=[2, 1], layout="constrained")
    styles: list[dict[str, Any]] = [{"linewidth": 3, "alpha": 0.4}, {"linestyle": "--"}]
    for r, style in zip(results, styles):
        curves.plot(r["losses"], label=NAMES[r["run"]], **style)
    curves.set(xlabel="step", ylabel="loss", title=f"largest difference {largest_difference(results):.1e}")
    curves.legend()
    found = bars.bar([NAMES[r["run"]] for r in results], [r["peak_bytes"] / 2**20 for r in results], color=["C0", "C1"])
    bars.bar_label(found, fmt="%.0f")
    bars.set(ylabel="MiB", title="peak memory of training")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m liger_ops.demo", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model-size", choices=SIZES, help="default: small on CPU, medium on CUDA")
    parser.add_argument("--compile", action="store_true", help="use torch.compile for both models")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="file for the picture")
    parser.add_argument("--run", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.model_size = arguments.model_size or ("medium" if arguments.device == "cuda" else "small")
    missing = [name for name in ("transformers", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"demo: needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    size = SIZES[arguments.model_size]
    if arguments.run:
        print(json.dumps(train(arguments.run, size, arguments.device, arguments.compile)))
        return
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    title = f"liger_ops {liger_ops.__version__} on {name}, torch {torch.__version__}"
    shape = f"hidden size {size.hidden}, {size.layers} layers"
    print(f"{title}\n{size.steps} steps of {size.batch} x {size.length} bytes, {shape}", flush=True)
    results = run_in_turns(size.steps, arguments)
    print(f"\n{results[1]['report']}\n\n{table(results)}\n")
    print(f"largest difference of the loss curves: {largest_difference(results):.1e}")
    draw(results, title, arguments.out)
    print(f"picture: {arguments.out.resolve()}")


if __name__ == "__main__":
    main()
