"""Training steps of a Llama-3-8B shape under FSDP2, with modules grouped as several engines group them.

    torchrun --nproc-per-node 2 -m benchmarks.sharded --providers hf,liger,ours --out DIR
    torchrun --nproc-per-node 2 -m benchmarks.sharded --tiny --device cpu --out DIR     (anywhere, in a minute)

Random weights, fp32 master weights, bf16 compute, causal SDPA, fused AdamW. Losses are compared with those of the
unpatched model in the same grouping. A profile of one step counts how often the head is gathered. Writes sharded.jsonl
and sharded.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.arguments import add_out, positive
from benchmarks.machine import describe
from benchmarks.pages import grid, write_above
from benchmarks.training import COMPARED_STEPS, MODELS, PROVIDERS, build, prepare, stepper, timed, tiny

GATHER = "FSDP::all_gather"


# ---- Groupings


def by_layers(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def norm_and_head(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    """As in accelerate and transformers."""
    fully_shard([model.model.norm, model.lm_head], **options)
    return by_layers(model, options)


def torchtitan(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    """As in torchtitan's apply_fsdp: norm and head stay gathered between forward and backward."""
    fully_shard(model.model.embed_tokens, **options)
    fully_shard([model.model.norm, model.lm_head], **options | {"reshard_after_forward": False})
    return by_layers(model, options)


def head_alone(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    """The head in a separate group. The fused loss computes its gradients in forward, so backward needs no gather."""
    fully_shard(model.lm_head, **options)
    if hasattr(type(model), "liger_original"):
        model.lm_head.set_unshard_in_backward(False)
    return by_layers(model, options)


def accelerate(model: torch.nn.Module, options: dict[str, Any]) -> torch.nn.Module:
    """Accelerator.prepare with mixed_precision="bf16". Without an optimizer it would not shard the model."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    os.environ["ACCELERATE_USE_FSDP"] = "true"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Accelerator(mixed_precision="bf16", fsdp_plugin=plugin).prepare(model, optimizer)[0]


GROUPINGS: dict[str, Callable] = {f.__name__: f for f in (by_layers, norm_and_head, torchtitan, head_alone, accelerate)}


# ---- One run


def head_gathers(step: Callable[[int], Any]) -> int:
    """How often a step gathers the group of the head. The gather of the root group has no name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(0)
    seen = Counter(e.name for e in profiler.events() if e.name == GATHER or e.name.startswith(f"{GATHER} ("))
    return sum(n for name, n in seen.items() if "lm_head" in name) or seen[GATHER]


def measure(grouping: str, provider: str, arguments: argparse.Namespace) -> dict[str, Any]:
    device, shape = arguments.device, MODELS["llama"]
    shape = tiny(shape) if arguments.tiny else shape
    model = build(shape._replace(layers=arguments.layers, length=arguments.length), device, torch.float32).train()
    forward = prepare(model, provider)
    options: dict[str, Any] = {"mesh": dist.init_device_mesh(device, (dist.get_world_size(),))}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = GROUPINGS[grouping](model, options)
    forward = sharded if forward is model else forward
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-5, fused=device == "cuda")
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (COMPARED_STEPS, arguments.batch, arguments.length)
    data = torch.randint(3, shape.vocabulary, size, generator=generator).to(device)
    mask = torch.ones(arguments.batch, arguments.length, dtype=torch.long, device=device)
    step = stepper(forward, optimizer, data, mask)
    losses = torch.stack([step(i) for i in range(COMPARED_STEPS)])
    dist.all_reduce(losses)
    return {
        **timed(step, arguments.steps, arguments.batch * arguments.length, device),
        "losses": (losses / dist.get_world_size()).tolist(),
        "head_gathers": head_gathers(step),
    }


def attempt(grouping: str, provider: str, arguments: argparse.Namespace) -> dict[str, Any]:
    record = {"kind": "sharded", "grouping": grouping, "provider": provider}
    try:
        return record | measure(grouping, provider, arguments)
    except Exception as error:
        return record | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


# ---- All of them


def markdown(machine: dict[str, Any], records: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    world = dist.get_world_size()
    facts = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("kind", "packages") and v not in (None, ""))
    plain = {r["grouping"]: r.get("losses") for r in records if r["provider"] == "hf"}
    rows = []
    for r in records:
        if "error" in r:
            rows.append([r["grouping"], PROVIDERS[r["provider"]], r["error"].replace("|", "/")[:60], "", "", ""])
            continue
        exact = plain.get(r["grouping"])
        gap = f"{max(abs(a - b) for a, b in zip(r['losses'], exact)):.1e}" if exact else ""
        numbers = [f"{r['tokens_per_second']:.0f}", f"{r['peak_gib']:.1f}", str(r["head_gathers"]), gap]
        rows.append([r["grouping"], PROVIDERS[r["provider"]], *numbers])
    header = ["grouping", "provider", "tok/s/GPU", "peak GiB", "gathers of the head", "largest loss difference from HF"]
    title = f"{arguments.layers} layers, batch {arguments.batch}, sequences of {arguments.length}"
    return f"# FSDP2 over {world} processes\n\n{title}. {facts}.\n\n" + grid(header, rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--groupings", default=",".join(GROUPINGS), help="default: %(default)s")
    parser.add_argument("--providers", default="hf,ours", help=f"comma-separated; known: {','.join(PROVIDERS)}")
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
    groupings, providers = arguments.groupings.split(","), arguments.providers.split(",")
    for option, given, known in (("--groupings", groupings, GROUPINGS), ("--providers", providers, PROVIDERS)):
        if not set(given) <= set(known):
            parser.error(f"{option} must be among {','.join(known)} (got {','.join(given)})")
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    rank = dist.get_rank()
    machine, records = describe(arguments.device), []
    if rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "sharded.jsonl").write_text(json.dumps(machine) + "\n")
    jobs = [(grouping, provider) for grouping in groupings for provider in providers]
    for done, job in enumerate(jobs, 1):
        records.append(attempt(*job, arguments))
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        if rank == 0:
            with open(arguments.out / "sharded.jsonl", "a") as log:
                print(json.dumps(records[-1]), file=log)
            shown = {k: v for k, v in records[-1].items() if k != "kind"}
            print(f"[{done}/{len(jobs)}] {shown}", file=sys.stderr, flush=True)
    if rank == 0:
        text = markdown(machine, records, arguments)
        write_above(arguments.out / "sharded.md", text)
        print(text)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()


if __name__ == "__main__":
    main()
