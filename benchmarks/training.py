"""Whole training steps of Hugging Face models: eager, compiled, and patched with kernels.

    python -m benchmarks.training --models llama qwen2 --providers hf,compile,liger,ours,ours-compile --out DIR
    python -m benchmarks.training --tiny --out DIR        (anywhere, in a minute)

Some layers of each model's shape, random weights, bf16, causal SDPA, fused AdamW. Every run has its own process, so that
a failure does not end the others, and its record is written at once. The losses of the first steps are compared with
those of the unpatched model. With --adapters, peft adds low-rank adapters, and only those are trained; with --base, beside
weights that bitsandbytes quantised. With --checkpointing, backward computes each layer again instead of saving its
activations. Writes training.jsonl, training.md and training.png. With --kernels, the page also lists the kernels of a step
and their times.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks import plots
from benchmarks.arguments import add_out, positive
from benchmarks.machine import describe
from benchmarks.pages import grid, write_above

PROVIDERS = {
    "hf": "HF eager",
    "compile": "HF + torch.compile",
    "liger": "liger-kernel",
    "liger-compile": "liger-kernel + torch.compile",
    "ours": "ours",
    "ours-compile": "ours + torch.compile",
    "ours-plain": "ours without operators of hybrid models",
    "ours-fp8": "ours, FP8 by rows",
    "ours-fp8-hp": "ours, FP8 by rows, gradients of weights in bf16",
    "ours-fp8-tensor": "ours, FP8 by tensors",
    "ours-fp8-blocks": "ours, FP8 by blocks",
    "torchao-rows": "HF + torchao's FP8 by rows, compiled",
    "torchao-tensor": "HF + torchao's FP8 by tensors, compiled",
}
RECIPES = {"ours-fp8": "rows", "ours-fp8-hp": "rows_hp", "ours-fp8-tensor": "tensor", "ours-fp8-blocks": "blocks"}
TORCHAO = {"torchao-rows": "rowwise", "torchao-tensor": "tensorwise"}
# Operators of hybrid models. Gated norms and routers share the switches of other norms and routers.
HYBRID = ("causal_conv1d", "delta_gates", "sigmoid_gate", "hyper_pre", "hyper_post")
LORA = ("adapters", "rank", "targets", "dropout", "base")
BASES = ("plain", "nf4", "int8")
DEFAULT_PROVIDERS = "hf,compile,liger,ours,ours-compile"
COMPARED_STEPS = 4
PROFILED_STEPS = 3
NAME_LETTERS = 100
LEAST_SHARE = 1e-3  # of the time of all kernels: faster kernels are not listed


class Shape(NamedTuple):
    model_type: str
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    batch: int
    head_size: int | None = None
    layers: int = 8
    length: int = 2048
    others: dict[str, Any] = {}


MODELS = {
    "llama": Shape("llama", 4096, 14336, 128256, 32, 8, batch=8),
    "qwen2": Shape("qwen2", 3584, 18944, 152064, 28, 4, batch=8),
    "gemma": Shape("gemma", 3072, 24576, 256000, 16, 16, batch=4, head_size=256),
    "mistral": Shape("mistral", 4096, 14336, 32000, 32, 8, batch=8),
    "phi3": Shape("phi3", 3072, 8192, 32064, 32, 32, batch=8),
    "qwen3": Shape("qwen3", 4096, 12288, 151936, 32, 8, batch=4, head_size=128),
    # Qwen3-30B-A3B.
    "qwen3_moe": Shape(
        "qwen3_moe", 2048, 6144, 151936, 32, 4, batch=4, head_size=128, layers=4, length=4096,
        others=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True),
    ),
    # Three delta nets and one attention, with a quarter of the experts of Qwen3-Next-80B-A3B.
    "qwen3_next": Shape(
        "qwen3_next", 2048, 5632, 151936, 16, 2, batch=4, head_size=256, layers=4,
        others=dict(num_experts=128, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512),
    ),
    # With an eighth of the experts.
    "deepseek_v4": Shape(
        "deepseek_v4", 4096, 2048, 129280, 64, 1, batch=2, head_size=512, layers=4,
        others=dict(n_routed_experts=32, moe_intermediate_size=2048),
    ),
    # Mamba-2 of 2.7B. Without mamba_ssm the scan holds every pair of tokens of a chunk, so chunks are short.
    "mamba2": Shape(
        "mamba2", 2560, 5120, 50288, 80, 80, batch=2, head_size=64, layers=4,
        others=dict(num_heads=80, state_size=128, n_groups=1, chunk_size=64),
    ),
}  # fmt: skip


def tiny(shape: Shape) -> Shape:
    sizes = dict(
        num_experts=8, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_heads=8,
    )  # fmt: skip
    return shape._replace(
        hidden=64,
        intermediate=128,
        vocabulary=1024,
        heads=4,
        kv_heads=2,
        batch=2,
        head_size=16 if shape.head_size else None,
        layers=2,
        length=64,
        others={k: sizes.get(k, v) for k, v in shape.others.items()},
    )


def shape_of(arguments: argparse.Namespace, model: str, batch: int | None) -> Shape:
    shape = tiny(MODELS[model]) if arguments.tiny else MODELS[model]
    asked = dict(layers=arguments.layers, length=arguments.length, batch=batch)
    return shape._replace(**{name: n for name, n in asked.items() if n})


# ---- One run


def causal_attention() -> str:
    """SDPA without a mask, since nothing is padded here. Before torch 2.14, transformers builds a mask when it is compiled,
    and then SDPA cannot use its flash kernel."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    AttentionMaskInterface.register("causal", lambda *_, **__: None)
    return "causal"


def build(shape: Shape, device: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = dict(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=shape.layers,
        max_position_embeddings=max(shape.length, 2048),
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **shape.others,
    )
    if shape.head_size:
        sizes["head_dim"] = shape.head_size
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(shape.model_type, **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=causal_attention())


def quantised(model: Any, base: str, device: str, dtype: torch.dtype) -> Any:
    """The model with its linear layers, but for the head, quantised by bitsandbytes."""
    import bitsandbytes

    def in_four_bits(*sizes: Any) -> torch.nn.Module:
        return bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4")

    def in_eight_bits(*sizes: Any) -> torch.nn.Module:
        return bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)

    make = {"nf4": in_four_bits, "int8": in_eight_bits}[base]
    for parent in [*model.modules()]:
        for name, linear in [*parent.named_children()]:
            if isinstance(linear, torch.nn.Linear) and linear is not model.get_output_embeddings():
                made = make(linear.in_features, linear.out_features, linear.bias is not None)
                made.load_state_dict(linear.state_dict())
                # Quantises.
                setattr(parent, name, made.to(device))
    # peft chooses its layers by these.
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = base == "nf4", base == "int8"
    return model


def add_adapters(model: Any, arguments: argparse.Namespace) -> Any:
    """The model with frozen weights and adapters of peft, or without adapters: the floor of a step with adapters."""
    (dtype,) = arguments.adapters
    if dtype == "none":
        model.requires_grad_(False)
        model.enable_input_require_grads()
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=arguments.rank,
        lora_alpha=2 * arguments.rank,
        lora_dropout=arguments.dropout,
        target_modules=arguments.targets if arguments.targets == "all-linear" else arguments.targets.split(","),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config, autocast_adapter_dtype=dtype == "float32")
    # B starts at zero. Gradients of A would be zeros too.
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-3)
    return adapted


def prepare(model: torch.nn.Module, provider: str) -> Any:
    if provider.startswith("liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model.get_base_model() if hasattr(model, "peft_config") else model)
    if provider.startswith("ours"):
        from liger_ops.transformers import apply_liger_kernel

        off = dict.fromkeys(HYBRID, False) if provider == "ours-plain" else {}
        print(apply_liger_kernel(model, fp8=RECIPES.get(provider), **off), file=sys.stderr)
    if provider in TORCHAO:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(TORCHAO[provider])
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)
    return torch.compile(model) if provider in TORCHAO or provider.endswith("compile") else model


def resident_peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def marks(device: str) -> Callable[[], Any]:
    """A function that marks the time. On a GPU it records an event, so that steps overlap as in a real training."""

    def event() -> torch.cuda.Event:
        here = torch.cuda.Event(enable_timing=True)
        here.record()
        return here

    return event if device == "cuda" else time.perf_counter


def elapsed(start: Any, end: Any) -> float:
    return start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start


def stepper(forward: Callable, optimizer: Optimizer, data: Tensor, mask: Tensor) -> Callable[[int], Tensor]:
    """A training step. It cycles through the COMPARED_STEPS batches of `data`."""

    def step(i: int) -> Tensor:
        ids = data[i % COMPARED_STEPS]
        loss = forward(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(step: Callable[[int], Any], steps: int, tokens: int, device: str) -> dict[str, float]:
    """The median time of warm steps with `tokens` tokens each, and their peak memory."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    mark = marks(device)
    times = [mark()]
    for i in range(steps):
        step(i)
        times.append(mark())
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = statistics.median(elapsed(start, end) for start, end in pairwise(times))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident_peak()
    return {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "peak_gib": peak / 2**30}


def by_name(kernels: Iterable[tuple[str, float]], steps: int) -> list[tuple[str, float, float]]:
    """(name, calls per step, ms per step), the longest first, from the (name, us) of every call in `steps` steps."""
    found: dict[str, list[float]] = {}
    for name, us in kernels:
        found.setdefault(name, []).append(us)
    rows = [(name, len(us) / steps, sum(us) / steps / 1e3) for name, us in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def kernels_of(step: Callable[[int], Any]) -> list[tuple[str, float, float]]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for i in range(PROFILED_STEPS):
            step(i)
        torch.cuda.synchronize()
    events = (e for e in profiler.events() if e.device_type == DeviceType.CUDA)
    return by_name(((e.name, e.time_range.elapsed_us()) for e in events), PROFILED_STEPS)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape, device = shape_of(arguments, arguments.model, arguments.batch), arguments.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: Any = build(shape, device, dtype)
    if arguments.base != "plain":
        model = quantised(model, arguments.base, device, dtype)
    if arguments.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if arguments.adapters:
        model = add_adapters(model, arguments)
    model.train()
    forward = prepare(model, arguments.provider)
    trained = [p for p in model.parameters() if p.requires_grad] or [torch.nn.Parameter(torch.zeros(1, device=device))]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(3, shape.vocabulary, (COMPARED_STEPS, shape.batch, shape.length), generator=generator).to(
        device
    )
    # As collators pass it. Without a mask, transformers searches the positions for packed sequences, which waits for the
    # device in every step.
    mask = torch.ones(shape.batch, shape.length, dtype=torch.long, device=device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    step = stepper(forward, optimizer, data, mask)
    synchronize()
    start = time.perf_counter()
    losses = [step(0)]
    synchronize()
    first = time.perf_counter() - start
    losses += [step(i) for i in range(1, COMPARED_STEPS)]
    synchronize()
    gc.collect()
    return {
        **timed(step, arguments.steps, shape.batch * shape.length, device),
        "first_step_seconds": first,
        "losses": [float(loss) for loss in losses],
        **({"kernels": kernels_of(step)} if arguments.kernels else {}),
    }


# ---- All of them


class Run:
    """One model with one provider. Its process starts at once and waits for its turn."""

    def __init__(
        self, model: str, batch: int | None, provider: str, adapters: str | None, arguments: argparse.Namespace
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.training", "--worker", "--model", model, "--provider", provider]
        shape = shape_of(arguments, model, batch)
        asked = dict(layers=shape.layers, length=shape.length, batch=shape.batch)
        for name, value in {**asked, "steps": arguments.steps, "device": arguments.device}.items():
            command += [f"--{name}", str(value)]
        command += [f"--{name}" for name in ("tiny", "kernels", "checkpointing") if getattr(arguments, name)]
        if adapters:
            asked |= {name: getattr(arguments, name) for name in LORA} | dict(adapters=adapters)
            command += [f"--{name}={asked[name]}" for name in LORA]
        asked |= {"checkpointing": True} if arguments.checkpointing else {}
        self.timeout = arguments.timeout
        self.record: dict[str, Any] = {
            "kind": "training", "model": model, "provider": provider, **asked,
        }  # fmt: skip
        # Without it, fragmentation adds to the peak of providers that free much memory.
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)

    def measured(self) -> dict[str, Any]:
        try:
            out, errors = self.process.communicate("go\n", timeout=self.timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return {**self.record, "error": f"no result in {self.timeout} s"}
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if self.process.returncode or not lines:
            last = (errors.strip().splitlines() or [f"exit code {self.process.returncode}"])[-1]
            return {**self.record, "error": last[:300]}
        return {**self.record, **json.loads(lines[-1])}


def load(arguments: argparse.Namespace) -> None:
    """Slow imports that need no GPU, before the turn of a worker."""
    kind = MODELS[arguments.model].model_type
    modules = ["transformers", f"transformers.models.{kind}.modeling_{kind}"]
    provider, _, compiled = arguments.provider.partition("-")
    modules += {"liger": ["liger_kernel.transformers"], "ours": ["liger_ops.transformers"]}.get(provider, [])
    modules += ["peft"] if arguments.adapters else []
    modules += ["bitsandbytes"] if arguments.base != "plain" else []
    modules += ["torchao.float8"] if provider == "torchao" else []
    modules += ["torch._inductor.compile_fx"] if "compile" in (provider, compiled) or provider == "torchao" else []
    for module in modules:
        importlib.import_module(module)


def loss_gap(record: dict[str, Any], records: list[dict[str, Any]]) -> float | None:
    """The largest difference from a loss of the unpatched model."""
    for other in records:
        same = all(
            other.get(k) == record.get(k) for k in ("model", "batch", "length", "layers", "checkpointing", *LORA)
        )
        if same and other["provider"] == "hf" and "losses" in other and "losses" in record:
            return max(abs(a - b) for a, b in zip(record["losses"], other["losses"]))
    return None


def model_of(record: dict[str, Any]) -> str:
    again = ", checkpointing" if record.get("checkpointing") else ""
    if "adapters" not in record:
        return record["model"] + again
    base = record.get("base", "plain")
    again = ("" if base == "plain" else f", {base} base") + again
    if record["adapters"] == "none":
        return f"{record['model']}, frozen, without adapters{again}"
    drops = f", dropout {record['dropout']}" if record["dropout"] else ""
    on = "" if record["targets"] == "all-linear" else f" on {record['targets']}"
    return f"{record['model']}, {record['adapters']} adapters of rank {record['rank']}{on}{drops}{again}"


def summary(record: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    head = [model_of(record), *(str(record[k]) for k in ("layers", "batch", "length")), PROVIDERS[record["provider"]]]
    if "error" in record:
        return [*head, record["error"].replace("|", "/"), "", "", ""]
    gap = loss_gap(record, records)
    return [
        *head, f"{record['tokens_per_second']:.0f}", f"{record['peak_gib']:.1f}", f"{record['first_step_seconds']:.1f}",
        "" if gap is None else f"{gap:.1e}",
    ]  # fmt: skip


def markdown(machine: dict[str, Any], records: list[dict[str, Any]], picture: str) -> str:
    facts = ", ".join(f"{k} {v}" for k, v in machine.items() if k not in ("kind", "packages") and v not in (None, ""))
    header = [
        "model",
        "layers",
        "batch",
        "length",
        "provider",
        "tok/s",
        "peak GiB",
        "first step s",
        "largest loss difference from HF",
    ]
    return (
        f"# Whole training steps\n\n![training steps]({picture})\n\n"
        f"Some layers of each model's shape. {facts}.\n\n"
        + grid(header, [summary(r, records) for r in records])
        + "\n"
        + "".join(map(kernel_table, records))
    )


def short(name: str) -> str:
    """A kernel's name without what all of PyTorch's share, up to the last word that fits."""
    for common in ("void ", "at::native::", "(anonymous namespace)::", "c10::"):
        name = name.replace(common, "")
    return name if len(name) <= NAME_LETTERS else re.sub(r"\w*$", "", name[:NAME_LETTERS])


def kernel_table(record: dict[str, Any]) -> str:
    kernels = record.get("kernels")
    if not kernels:
        return ""
    total = sum(ms for _, _, ms in kernels)
    rows = [[short(name), f"{n:.0f}", f"{ms:.2f}"] for name, n, ms in kernels if ms >= LEAST_SHARE * total]
    title = f"{record['model']}, batch {record['batch']}, {PROVIDERS[record['provider']]}"
    return (
        f"\n## {title}: kernels of a step, {total:.1f} ms\n\nKernels with at least {LEAST_SHARE:.1%} of the time.\n\n"
        + grid(["kernel", "calls", "ms"], rows)
        + "\n"
    )


def draw(records: list[dict[str, Any]], path: Path, machine: str) -> None:
    good = [r for r in records if "error" not in r]
    if not good:
        return

    def group(r: dict[str, Any]) -> str:
        return f"{model_of(r).replace(', ', chr(10))}\n{r['layers']} layers, {r['batch']} × {r['length']}"

    groups = list(dict.fromkeys(map(group, good)))
    names = [name for p, name in PROVIDERS.items() if any(r["provider"] == p for r in good)]
    names.sort(key=lambda name: not plots.is_ours(name))
    title = f"{machine}: training steps"
    height = 0.6 + 0.2 * (len(names) + 0.8) * len(groups)
    panels = (("tokens_per_second", f"tokens per second ({plots.HIGHER})", "{:,.0f}"),
              ("peak_gib", f"peak memory, GiB ({plots.LOWER})", "{:.1f}"))  # fmt: skip
    try:
        with plots.figure_of(path, title, 1, 2, height, names, "s", sharey=True) as (_, (axes,)):
            for axis, (field, label, form) in zip(axes, panels):
                values = {(group(r), PROVIDERS[r["provider"]]): r[field] for r in good}
                plots.bar_panel(axis, groups, names, values, form.format)
                axis.set_title(label)
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)


def write(machine: dict[str, Any], records: list[dict[str, Any]], stem: Path) -> str:
    text = markdown(machine, records, f"{stem.name}.png")
    write_above(stem.with_suffix(".md"), text)
    draw(records, stem.with_suffix(".png"), plots.machine_name([machine]))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama", "qwen2", "gemma", "mistral"])
    parser.add_argument("--providers", default=DEFAULT_PROVIDERS, help=f"comma-separated; known: {','.join(PROVIDERS)}")
    parser.add_argument("--batches", nargs="+", type=positive, help="default: of each model")
    parser.add_argument("--layers", type=positive)
    parser.add_argument("--length", type=positive)
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--adapters",
        nargs="+",
        choices=["float32", "bfloat16", "none"],
        help="train adapters of these dtypes; none: a frozen model, only with ours",
    )
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--targets", default="all-linear", help="comma-separated names of linear layers")
    parser.add_argument("--dropout", type=float, default=0.0, help="of adapters")
    parser.add_argument(
        "--base", choices=BASES, default="plain", help="weights beside adapters; quantised by bitsandbytes"
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of each layer")
    parser.add_argument("--kernels", action="store_true", help="also profile some steps, on a GPU")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to test the script")
    parser.add_argument("--timeout", type=positive, default=300, help="time limit of one run in seconds")
    add_out(parser)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("--model", str), ("--provider", str), ("--batch", positive)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.kernels and arguments.device != "cuda":
        parser.error("--kernels needs a GPU")
    if arguments.base != "plain" and not arguments.adapters:
        parser.error("--base needs --adapters")
    if arguments.worker:
        load(arguments)
        if sys.stdin.readline():
            print(json.dumps(measure(arguments)))
        return
    providers = arguments.providers.split(",")
    unknown = [p for p in providers if p not in PROVIDERS]
    if unknown:
        parser.error(f"--providers must be among {','.join(PROVIDERS)} (got {','.join(unknown)})")
    arguments.out.mkdir(parents=True, exist_ok=True)
    machine = describe(arguments.device)
    jobs = [
        (m, b, p, a)
        for a in arguments.adapters or [None]
        for m in arguments.models
        for b in arguments.batches or [None]
        for p in providers
        if a != "none" or p == "ours"
    ]
    records: list[dict[str, Any]] = []
    with open(arguments.out / "training.jsonl", "w") as log:
        print(json.dumps(machine), file=log, flush=True)
        early = arguments.device == "cuda"  # on a CPU, a starting process would slow down the measured one
        waiting = None
        for done, job in enumerate(jobs, 1):
            run = waiting or Run(*job, arguments)
            waiting = Run(*jobs[done], arguments) if early and done < len(jobs) else None
            records.append(run.measured())
            print(json.dumps(records[-1]), file=log, flush=True)
            print(f"[{done}/{len(jobs)}] " + "  ".join(summary(records[-1], records)), file=sys.stderr, flush=True)
    print(write(machine, records, arguments.out / "training"))


if __name__ == "__main__":
    main()
