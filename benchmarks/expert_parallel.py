"""A layer of experts split over GPUs, forward and backward.

    torchrun --nproc-per-node 2 -m benchmarks.expert_parallel --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.expert_parallel --tiny --device cpu --out DIR     (anywhere, in a minute)

Each rank has an equal part of the experts and computes their share of all tokens. Replicated: every rank has the tokens,
and the shares are all-reduced. Sequence: every rank has a part of the tokens, which is gathered, and the shares are
reduce-scattered. The experts take DTensors, or plain tensors and ids that count from this rank's first expert. "no
communication" is this rank's share alone. Outputs and gradients must equal those of one GPU within rounding. Times are
medians of the slowest rank; memory is the peak above the inputs. Writes expert-parallel.jsonl and expert-parallel.md.
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from benchmarks import moe_experts
from benchmarks.arguments import add_out, positive
from benchmarks.clock import CpuClock, CudaClock
from benchmarks.machine import describe
from benchmarks.pages import grid, write_above
from liger_ops import functional as F

DTYPE = torch.bfloat16
# The share of each rank, their sum, and the result of one GPU are rounded, each by at most half a unit in the last place.
LIMIT = 3 * torch.finfo(DTYPE).eps / 2
WEIGHTS = ("gate_up", "down")


class Make:
    """The same numbers on every rank."""

    dtype = DTYPE

    def __init__(self, device: str) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)


class Inputs:
    """whole: of one GPU. parts: this rank's experts, and its part of the tokens."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.mesh = dist.init_device_mesh(arguments.device, (dist.get_world_size(),))
        self.ranks, self.rank = self.mesh.size(), self.mesh.get_local_rank()
        make = Make(arguments.device)
        shape = (arguments.tokens, arguments.hidden, arguments.inner, arguments.experts, arguments.choices)
        self.whole = moe_experts.inputs(make, *shape)
        self.upstream = make.normal(arguments.tokens, arguments.hidden)
        self.first = self.rank * (arguments.experts // self.ranks)
        self.parts = {name: t.chunk(self.ranks)[self.rank].clone() for name, t in self.whole.items()}
        for t in (*self.whole.values(), *self.parts.values()):
            t.requires_grad_(t.is_floating_point())

    def forget(self) -> None:
        for t in (*self.whole.values(), *self.parts.values()):
            t.grad = None


Result = dict[str, Tensor]


def differentiated(i: Inputs, out: Tensor, tensors: dict[str, Tensor], split: bool) -> Result:
    """out and gradients."""
    out.backward(i.upstream.chunk(i.ranks)[i.rank] if split else i.upstream)
    return {"out": out.detach()} | {name: t.grad for name, t in tensors.items() if t.grad is not None}


def one_gpu(i: Inputs) -> Result:
    return differentiated(i, F.moe_experts(**i.whole), i.whole, False)


def no_communication(i: Inputs) -> Result:
    given = i.whole | {name: i.parts[name] for name in WEIGHTS} | {"index": i.whole["index"] - i.first}
    return differentiated(i, F.moe_experts(**given), given, False)


def parallel(i: Inputs, split: bool, distributed: bool) -> Result:
    own = {name: t if split or name in WEIGHTS else i.whole[name] for name, t in i.parts.items()}
    given = {
        name: DTensor.from_local(t, i.mesh, [Shard(0) if split or name in WEIGHTS else Replicate()], run_check=False)
        for name, t in own.items()
    }
    given |= {name: t.redistribute(placements=[Replicate()]) for name, t in given.items() if name not in WEIGHTS}
    if distributed:
        out = F.moe_experts(**given)
    else:
        local = {n: t.to_local(grad_placements=None if n in WEIGHTS else [Partial()]) for n, t in given.items()}
        share = F.moe_experts(**local | {"index": local["index"] - i.first})
        out = DTensor.from_local(share, i.mesh, [Partial()], run_check=False)
    out = out.redistribute(placements=[Shard(0) if split else Replicate()]).to_local()
    return differentiated(i, out, own, split)


CASES: dict[str, Callable[[Inputs], Result]] = {
    "one GPU": one_gpu,
    "no communication": no_communication,
    "local ids, replicated": lambda i: parallel(i, split=False, distributed=False),
    "DTensor, replicated": lambda i: parallel(i, split=False, distributed=True),
    "local ids, sequence": lambda i: parallel(i, split=True, distributed=False),
    "DTensor, sequence": lambda i: parallel(i, split=True, distributed=True),
}


def largest_error(i: Inputs, found: Result, expected: Result) -> float:
    """The largest relative error of a result, whole or this rank's part, over all ranks."""
    errors = []
    for name, t in expected.items():
        part = t if t.shape == found[name].shape else t.chunk(i.ranks)[i.rank]
        errors.append(float((found[name].float() - part.float()).norm() / part.float().norm()))
    of_all: list[Any] = [None] * i.ranks
    dist.all_gather_object(of_all, max(errors))
    return max(of_all)


def measure(name: str, i: Inputs, expected: Result, clock: Any, rounds: int) -> dict[str, Any]:
    step = CASES[name]
    record: dict[str, Any] = {"kind": "expert-parallel", "op": "moe_experts", "provider": name}
    i.forget()
    found = step(i)
    if name != "no communication":
        record["error"] = largest_error(i, found, expected)
        assert record["error"] <= LIMIT, f"{name}: its relative error is {record['error']:.1e}, above {LIMIT:.1e}"
    del found

    def call(_: Any) -> None:
        step(i)

    peak = clock.peak_bytes(i.forget, call)
    times = []
    for _ in range(rounds):
        dist.barrier()
        mine = clock.samples(i.forget, call, 1)[0]
        of_all: list[Any] = [None] * i.ranks
        dist.all_gather_object(of_all, mine)
        times.append(max(of_all))
    return record | {"ms": statistics.median(times) / 1e3, "samples": times, "peak_bytes": peak}


def markdown(machine: dict[str, Any], records: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("kind", "packages") and v not in (None, ""))
    rows = [
        [r["provider"], f"{r['ms']:.2f}", f"{r['peak_bytes'] / 1e6:.0f}", f"{r['error']:.1e}" if "error" in r else ""]
        for r in records
    ]
    a, ranks = arguments, dist.get_world_size()
    shape = f"{a.tokens} tokens, {a.hidden} hidden, {a.inner} inner, {a.experts} experts, top-{a.choices}, bfloat16"
    return (
        f"# Experts split over {ranks} processes\n\n{shape}; forward and backward. {facts}.\n\n"
        f"Made by `torchrun --nproc-per-node {ranks} -m benchmarks.expert_parallel`.\n\n"
        + grid(["experts", "ms", "peak MB above the inputs", "largest relative error"], rows)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.expert_parallel", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=16384)
    parser.add_argument("--hidden", type=positive, default=2048)
    parser.add_argument("--inner", type=positive, default=768)
    parser.add_argument("--experts", type=positive, default=128)
    parser.add_argument("--choices", type=positive, default=8)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    add_out(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.tokens, arguments.hidden, arguments.inner, arguments.experts = 32, 32, 16, 8
        arguments.choices, arguments.rounds = 2, 2
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    for name in ("tokens", "experts"):
        if getattr(arguments, name) % dist.get_world_size():
            parser.error(f"--{name} must be divisible by {dist.get_world_size()} (got {getattr(arguments, name)})")
    clock: Any = CudaClock() if arguments.device == "cuda" else CpuClock()
    machine, inputs, records = describe(arguments.device), Inputs(arguments), []
    expected = one_gpu(inputs)
    for done, name in enumerate(CASES, 1):
        records.append(measure(name, inputs, expected, clock, arguments.rounds))
        if dist.get_rank() == 0:
            shown = f"{records[-1]['ms']:.2f} ms, {records[-1]['peak_bytes'] / 1e6:.0f} MB"
            print(f"[{done}/{len(CASES)}] {name}: {shown}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(r) + "\n" for r in [machine, *records])
        (arguments.out / "expert-parallel.jsonl").write_text(lines)
        text = markdown(machine, records, arguments)
        write_above(arguments.out / "expert-parallel.md", text)
        print(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
