"""The loss of a head whose classes are split over GPUs, forward and backward.

    torchrun --nproc-per-node 2 -m benchmarks.vocab_parallel --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.vocab_parallel --tiny --device cpu --out DIR     (anywhere, in a minute)

Peers: PyTorch's loss_parallel on the logits, and the logits gathered. "ours, no communication" is our operator on this
rank's classes alone, the least that a vocab-parallel loss can take. Inputs are replicated, or with "sequence" split over
the ranks. Times are medians of the slowest rank; memory is the peak above the inputs. Writes vocab-parallel.jsonl,
vocab-parallel.md and vocab-parallel.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks.arguments import add_out, positive
from benchmarks.clock import CpuClock, CudaClock
from benchmarks.machine import describe
from benchmarks.pages import grid, write_above
from benchmarks.plots import color, figure_of
from liger_ops import functional as F


class Inputs:
    """Of one rank, the same on all ranks where they are replicated."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.mesh = dist.init_device_mesh(arguments.device, (dist.get_world_size(),))
        self.ranks, self.rank = self.mesh.size(), self.mesh.get_local_rank()
        self.group, self.classes = self.mesh.get_group().group_name, arguments.classes
        generator = torch.Generator(arguments.device).manual_seed(0)

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            t = torch.randn(shape, generator=generator, device=arguments.device)
            return (t * scale).bfloat16()

        shape = (arguments.batch, arguments.tokens // arguments.batch)
        self.x = randn(*shape, arguments.hidden).requires_grad_()
        self.part = self.x.detach().chunk(self.ranks, 1)[self.rank].contiguous().requires_grad_()
        self.weight = randn(arguments.classes, arguments.hidden, scale=arguments.hidden**-0.5).chunk(self.ranks)[
            self.rank
        ]
        self.weight = self.weight.clone().requires_grad_()
        self.target = torch.randint(arguments.classes, shape, generator=generator, device=arguments.device)
        self.local_target = self.target % len(self.weight)
        self.logits = randn(arguments.tokens, len(self.weight), scale=3.0).requires_grad_()

    def whole(self, t: Tensor, dim: int) -> DTensor:
        return DTensor.from_local(t, self.mesh, [Shard(dim)], run_check=False)

    def head(self) -> tuple[DTensor, DTensor]:
        x = DTensor.from_local(self.x, self.mesh, [Replicate()], run_check=False)
        return x.flatten(0, 1), self.whole(self.weight, 0)


def torch_loss_parallel(logits: Any, target: Tensor) -> None:
    target = distribute_tensor(target.flatten(), logits.device_mesh, [Replicate()])
    with loss_parallel():
        torch.nn.functional.cross_entropy(logits.float(), target).backward()


def torch_gathered(i: Inputs) -> None:
    x, weight = i.head()
    logits = (x @ weight.t()).redistribute(placements=[Replicate()]).to_local()
    torch.nn.functional.cross_entropy(logits.float(), i.target.flatten()).backward()


def torch_linear(i: Inputs) -> None:
    x, weight = i.head()
    torch_loss_parallel(x @ weight.t(), i.target)


# (operator, provider) -> one step
CASES: dict[tuple[str, str], Callable[[Inputs], Any]] = {
    ("linear cross entropy", "torch, gathered logits"): torch_gathered,
    ("linear cross entropy", "torch, loss_parallel"): torch_linear,
    ("linear cross entropy", "ours, no communication"): lambda i: F.fused_linear_cross_entropy(
        i.x, i.weight, i.local_target
    ).backward(),
    ("linear cross entropy", "ours"): lambda i: F.fused_linear_cross_entropy(
        i.x, i.weight, i.target, group=i.group, classes=i.classes
    ).backward(),
    ("linear cross entropy", "ours, sequence"): lambda i: F.fused_linear_cross_entropy(
        i.part, i.weight, i.target, group=i.group, classes=i.classes, sequence_dim=1
    ).backward(),
    ("cross entropy", "torch, loss_parallel"): lambda i: torch_loss_parallel(i.whole(i.logits, 1), i.target),
    ("cross entropy", "ours, no communication"): lambda i: F.cross_entropy(
        i.logits, i.local_target.flatten()
    ).backward(),
    ("cross entropy", "ours"): lambda i: F.cross_entropy(
        i.logits, i.target.flatten(), group=i.group, classes=i.classes
    ).backward(),
}


def measure(op: str, provider: str, inputs: Inputs, clock: Any, rounds: int) -> dict[str, Any]:
    step = CASES[op, provider]

    def prepare() -> None:
        for t in (inputs.x, inputs.part, inputs.weight, inputs.logits):
            t.grad = None

    def call(_: Any) -> None:
        step(inputs)

    record: dict[str, Any] = {"kind": "vocab-parallel", "op": op, "provider": provider}
    for _ in range(2):
        prepare()
        call(None)
    peak = clock.peak_bytes(prepare, call)
    times = []
    for _ in range(rounds):
        dist.barrier()
        mine = clock.samples(prepare, call, 1)[0]
        of_all: list[Any] = [None] * inputs.ranks
        dist.all_gather_object(of_all, mine)
        times.append(max(of_all))
    return record | {"ms": statistics.median(times) / 1e3, "samples": times, "peak_bytes": peak}


def markdown(machine: dict[str, Any], records: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("kind", "packages") and v not in (None, ""))
    rows = [[r["op"], r["provider"], f"{r['ms']:.2f}", f"{r['peak_bytes'] / 1e6:.0f}"] for r in records]
    shape = f"{arguments.tokens} tokens, {arguments.hidden} hidden, {arguments.classes} classes, bfloat16"
    command = f"torchrun --nproc-per-node {dist.get_world_size()} -m benchmarks.vocab_parallel"
    return (
        f"# Losses over a vocabulary split over {dist.get_world_size()} processes\n\n"
        f"![time and memory](vocab-parallel.png)\n\n{shape}; forward and backward. {facts}.\n\nMade by `{command}`.\n\n"
        + grid(["operator", "provider", "ms", "peak MB above the inputs"], rows)
        + "\n"
    )


def draw(records: list[dict[str, Any]], machine: dict[str, Any], path: Any) -> None:
    ranks = dist.get_world_size()
    title = f"{ranks} × {machine.get('gpu') or machine['cpu']}: losses over a split vocabulary (lower is better)"
    labels = [f"{r['op']}: {r['provider']}" for r in records]
    with figure_of(path, title, 1, 2, 0.6 + 0.32 * len(records), sharey=True) as (_, (axes,)):
        for axis, key, label, scale in zip(axes, ("ms", "peak_bytes"), ("time, ms", "peak memory, GB"), (1, 1e-9)):
            values = [r[key] * scale for r in records]
            axis.barh(labels, values, color=[color(r["provider"].split(",")[0]) for r in records])
            for y, value in enumerate(values):
                axis.text(value, y, f" {value:.2f}", va="center", fontsize=8)
            axis.set_xlim(0, 1.15 * max(values))
            axis.set_title(label)
        axes[0].invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.vocab_parallel", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--hidden", type=positive, default=4096)
    parser.add_argument("--classes", type=positive, default=128256)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.tokens, arguments.hidden, arguments.classes, arguments.rounds = 16, 32, 64, 2
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    clock: Any = CudaClock() if arguments.device == "cuda" else CpuClock()
    machine, inputs, records = describe(arguments.device), Inputs(arguments), []
    for done, (op, provider) in enumerate(CASES, 1):
        records.append(measure(op, provider, inputs, clock, arguments.rounds))
        if dist.get_rank() == 0:
            shown = f"{records[-1]['ms']:.2f} ms, {records[-1]['peak_bytes'] / 1e6:.0f} MB"
            print(f"[{done}/{len(CASES)}] {op}, {provider}: {shown}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(r) + "\n" for r in [machine, *records])
        (arguments.out / "vocab-parallel.jsonl").write_text(lines)
        draw(records, machine, arguments.out / "vocab-parallel.png")
        text = markdown(machine, records, arguments)
        write_above(arguments.out / "vocab-parallel.md", text)
        print(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
