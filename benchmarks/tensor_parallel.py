"""Training steps of a Llama-3-8B shape under tensor and sequence parallelism.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --tiny --device cpu --out DIR     (anywhere, in a minute)

`parallelize_module` with torchtitan's plan: column- and row-parallel linear layers, activations split along the sequence
between them, and a head that is split by class. Random weights, bf16, causal SDPA, fused AdamW. Peers: gathered logits, and
PyTorch's loss_parallel. Compiled runs compile everything but the head and its loss. Writes tensor-parallel.jsonl,
tensor-parallel.md and tensor-parallel.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import liger_ops.distributed
import liger_ops.nn
from benchmarks import plots
from benchmarks.arguments import add_out, positive
from benchmarks.machine import describe
from benchmarks.pages import grid, write_above
from benchmarks.training import COMPARED_STEPS, MODELS, build, prepare, timed, tiny

SPLIT = Shard(1)


def plan(layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=SPLIT),
        "model.norm": SequenceParallel(),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            found[layer + name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            found[layer + name] = RowwiseParallel(output_layouts=SPLIT)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[layer + name] = SequenceParallel()
        found[layer + "self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": SPLIT}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        found[layer + "mlp"] = PrepareModuleInput(input_layouts=(SPLIT,), desired_input_layouts=(Replicate(),))
    return found


def gathered(model: Any, hidden: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), target.flatten())
    loss.backward()
    return loss


def split_by_class(model: Any, hidden: Tensor, target: Tensor) -> Tensor:
    with loss_parallel():
        loss = F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), target.flatten())
        loss.backward()
    return loss.full_tensor()  # type: ignore[attr-defined]


def fused(model: Any, hidden: Tensor, target: Tensor) -> Tensor:
    loss = model.lm_head(hidden, target)
    loss.backward()
    return loss


# provider -> (kernels of benchmarks.training.prepare, style of the head, loss and its backward)
PROVIDERS: dict[str, tuple[str, Callable[[], Any], Callable]] = {
    "torch, gathered logits": (
        "hf",
        lambda: ColwiseParallel(input_layouts=SPLIT, output_layouts=Replicate()),
        gathered,
    ),
    "torch, loss_parallel": (
        "hf",
        lambda: ColwiseParallel(input_layouts=SPLIT, output_layouts=Shard(-1), use_local_output=False),
        split_by_class,
    ),
    "liger-kernel": ("liger", lambda: ColwiseParallel(input_layouts=SPLIT, output_layouts=Replicate()), gathered),
    "ours": ("ours", lambda: liger_ops.distributed.LossHeadParallel(input_layouts=SPLIT), fused),
}
COMPILED = " + torch.compile"
ALL = [name + suffix for suffix in ("", COMPILED) for name in PROVIDERS]


def loss_head(model: Any) -> None:
    old = model.lm_head
    model.lm_head = liger_ops.nn.LinearLossHead(old.in_features, old.out_features, bias=False, device="meta")
    model.lm_head.weight = old.weight


def measure(provider: str, arguments: argparse.Namespace) -> dict[str, Any]:
    kernels, style, loss_of = PROVIDERS[provider.removesuffix(COMPILED)]
    device, shape = arguments.device, tiny(MODELS["llama"]) if arguments.tiny else MODELS["llama"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = build(shape._replace(layers=arguments.layers, length=arguments.length), device, dtype).train()
    if loss_of is fused:
        loss_head(model)
    prepare(model.model if kernels == "ours" else model, kernels)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    parallelize_module(model, mesh, plan(arguments.layers) | {"lm_head": style()})
    if provider.endswith(COMPILED):
        model.model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    generator = torch.Generator().manual_seed(0)
    size = (COMPARED_STEPS, 2, arguments.batch, arguments.length)
    data = torch.randint(3, shape.vocabulary, size, generator=generator).to(device)
    positions = torch.arange(arguments.length, device=device)[None]

    def step(i: int) -> Tensor:
        ids, target = data[i % COMPARED_STEPS]
        hidden = model.model(input_ids=ids, position_ids=positions).last_hidden_state
        loss = loss_of(model, hidden, target)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [float(step(i)) for i in range(COMPARED_STEPS)]
    return timed(step, arguments.steps, arguments.batch * arguments.length, device) | {"losses": losses}


def attempt(provider: str, arguments: argparse.Namespace) -> dict[str, Any]:
    record = {"kind": "tensor-parallel", "provider": provider}
    try:
        return record | measure(provider, arguments)
    except Exception as error:
        return record | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def markdown(machine: dict[str, Any], records: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("kind", "packages") and v not in (None, ""))
    exact = next((r["losses"] for r in records if "losses" in r), [])
    rows = []
    for r in records:
        if "error" in r:
            rows.append([r["provider"], r["error"].replace("|", "/")[:90], "", ""])
            continue
        gap = max(abs(a - b) for a, b in zip(r["losses"], exact))
        rows.append([r["provider"], f"{r['tokens_per_second']:.0f}", f"{r['peak_gib']:.1f}", f"{gap:.1e}"])
    world = dist.get_world_size()
    return (
        f"# Tensor and sequence parallelism over {world} processes\n\n![training steps](tensor-parallel.png)\n\n"
        f"{arguments.layers} layers, batch {arguments.batch}, sequences of {arguments.length}. {facts}.\n\n"
        f"Made by `torchrun --nproc-per-node {world} -m benchmarks.tensor_parallel`.\n\n"
        + grid(["provider", "tok/s", "peak GiB", "largest loss difference from the first row"], rows)
        + "\n"
    )


def draw(records: list[dict[str, Any]], machine: dict[str, Any], path: Any) -> None:
    good = [r for r in records if "error" not in r]
    title = (
        f"{dist.get_world_size()} × {machine.get('gpu') or machine['cpu']}: steps under tensor and sequence parallelism"
    )
    panels = (("tokens_per_second", f"tokens per second ({plots.HIGHER})", "{:,.0f}"),
              ("peak_gib", f"peak memory, GiB ({plots.LOWER})", "{:.1f}"))  # fmt: skip
    with plots.figure_of(path, title, 1, 2, 0.8 + 0.35 * len(good), sharey=True) as (_, (axes,)):
        for axis, (field, label, form) in zip(axes, panels):
            values = [r[field] for r in good]
            axis.barh(
                [r["provider"] for r in good],
                values,
                color=[plots.color(re.split(",| \\+", r["provider"])[0]) for r in good],
            )
            for y, value in enumerate(values):
                axis.text(value, y, " " + form.format(value), va="center", fontsize=8)
            axis.set_xlim(0, 1.2 * max(values))
            axis.set_title(label)
        axes[0].invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument("--providers", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--layers", type=positive)
    parser.add_argument("--length", type=positive)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    add_out(parser)
    arguments = parser.parse_args()
    arguments.layers = arguments.layers or (2 if arguments.tiny else 8)
    arguments.length = arguments.length or (64 if arguments.tiny else 2048)
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    rank, records = dist.get_rank(), []
    machine = describe(arguments.device)
    for done, provider in enumerate(arguments.providers, 1):
        records.append(attempt(provider, arguments))
        gc.collect()
        torch.compiler.reset()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            shown = {k: v for k, v in records[-1].items() if k != "kind"}
            print(f"[{done}/{len(arguments.providers)}] {shown}", file=sys.stderr, flush=True)
    if rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(r) + "\n" for r in [machine, *records])
        (arguments.out / "tensor-parallel.jsonl").write_text(lines)
        draw(records, machine, arguments.out / "tensor-parallel.png")
        text = markdown(machine, records, arguments)
        write_above(arguments.out / "tensor-parallel.md", text)
        print(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
