"""Post-training losses, forward and backward: ours, eager code with all logits, and liger-kernel's chunked losses.

    python -m benchmarks.post_training --out DIR [--shape 8x1024x4096x151936] [--losses dpo grpo] [--frozen-head]

The shape is sequences, positions, hidden size and classes. Writes post-training.jsonl, .md and .png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import plots
from benchmarks.arguments import add_out, positive, shape_of
from benchmarks.clock import MIB, CpuClock, CudaClock
from benchmarks.machine import describe, slug
from benchmarks.pages import grid
from liger_ops import functional as F
from liger_ops import losses

SHAPES = {"cuda": (8, 1024, 4096, 151936), "cpu": (4, 16, 32, 512)}
PROVIDERS = ("torch", "liger-kernel", "ours")
TEACHER = 2  # times the student's hidden size


# ---- The losses


class Batch:
    """Random states of a model and of a reference or teacher, and a batch of sequences."""

    def __init__(self, shape: tuple[int, ...], device: str, frozen_head: bool) -> None:
        rows, positions, width, self.classes = shape
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def made(*size: int, grad: bool = False) -> Tensor:
            return torch.randn(*size, device=device, dtype=dtype).mul_(size[-1] ** -0.5).requires_grad_(grad)

        self.hidden, self.weight = (
            made(rows, positions, width, grad=True),
            made(self.classes, width, grad=not frozen_head),
        )
        self.ref_hidden, self.ref_weight = made(rows, positions, width), made(self.classes, width)
        self.teacher_hidden = made(rows, positions, TEACHER * width)
        self.teacher_weight = made(self.classes, TEACHER * width)
        self.target = torch.randint(self.classes, (rows, positions), device=device)
        self.target[:, : positions // 8] = -100
        self.mask, self.ids = (self.target != -100).long(), self.target.clamp(min=0)
        self.advantages, self.old = torch.randn(rows, device=device), torch.full((rows, positions), -9.0, device=device)
        self.desirable = torch.arange(rows, device=device) % 2 == 0

    def flat(self) -> tuple[Tensor, ...]:
        hidden, teacher = (t.flatten(0, 1) for t in (self.hidden, self.teacher_hidden))
        return hidden, self.weight, teacher, self.teacher_weight, self.target.flatten()


def ours() -> dict[str, Callable[[Batch], Tensor]]:
    reference = lambda b: dict(ref_hidden=b.ref_hidden, ref_weight=b.ref_weight)  # noqa: E731
    return {
        "dpo": lambda b: losses.dpo_loss(b.hidden, b.weight, b.target, **reference(b))[0],
        "orpo": lambda b: losses.orpo_loss(b.hidden, b.weight, b.target)[0],
        "kto": lambda b: losses.kto_loss(b.hidden, b.weight, b.target, b.desirable, **reference(b))[0],
        "grpo": lambda b: losses.grpo_loss(
            b.hidden, b.weight, b.ids, b.mask, b.advantages, old_log_probs=b.old, beta=0.04, **reference(b)
        )[0],
        "jsd": lambda b: losses.distillation_loss(*b.flat(), beta=0.5)[0],
        "jsd + hard": lambda b: losses.distillation_loss(*b.flat(), beta=0.5, soft_weight=0.5, hard_weight=0.5)[0],
        "cosine": lambda b: losses.cosine_distillation_loss(*b.flat(), soft_weight=0.5, hard_weight=0.5)[0],
    }


def liger_kernels() -> dict[str, Callable[[Batch], Tensor]]:
    import liger_kernel.chunked_loss as theirs

    reference = lambda b: dict(ref_input=b.ref_hidden, ref_weight=b.ref_weight)  # noqa: E731
    return {
        "dpo": lambda b: theirs.LigerFusedLinearDPOLoss()(b.weight, b.hidden, b.target, **reference(b))[0],
        "orpo": lambda b: theirs.LigerFusedLinearORPOLoss()(b.weight, b.hidden, b.target)[0],
        "kto": lambda b: theirs.LigerFusedLinearKTOLoss(use_ref_model=True)(
            b.hidden, b.weight, b.target, preference_labels=b.desirable, **reference(b)
        )[0],
        "grpo": lambda b: theirs.LigerFusedLinearGRPOLoss()(
            b.hidden, b.weight, b.ids, b.mask, b.advantages, old_per_token_logps=b.old, **reference(b)
        )[0],
        "jsd": lambda b: theirs.LigerFusedLinearJSDLoss(0.0, 1.0)(*b.flat()),
        "jsd + hard": lambda b: theirs.LigerFusedLinearJSDLoss()(*b.flat()),
        "cosine": lambda b: theirs.LigerFusedLinearCosineSimilarityLoss(beta=1.0)(*b.flat()),
    }


@contextmanager
def all_logits() -> Iterator[None]:
    """The same losses on whole logits, in eager code."""

    def log_probs(input: Tensor, weight: Tensor, target: Tensor, bias: Any = None, **options: Any) -> Any:
        logs = torch.nn.functional.linear(input, weight).float().log_softmax(-1)
        chosen = logs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(target == -100, 0)
        entropy = -(logs.exp() * logs).sum(-1) if options.get("entropy_grad") else torch.zeros_like(chosen)
        return SimpleNamespace(log_probs=chosen, entropy=entropy)

    def divergence(
        input: Tensor, weight: Tensor, teacher: Tensor, teacher_weight: Tensor, *_: Any, **options: Any
    ) -> Any:
        pairs = (input, weight), (teacher, teacher_weight)
        x, t = (torch.nn.functional.linear(*pair).float().log_softmax(-1) for pair in pairs)
        return (F.jsd(x, t, None, 0.5, -100, "none").sum(-1) * options["token_weight"] * options["mask"]).sum(), x[:, 0]

    def cross_entropy(input: Tensor, weight: Tensor, target: Tensor, *_: Any, **options: Any) -> Tensor:
        logits = torch.nn.functional.linear(input, weight).float()
        each = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        return (each * options["token_weight"]).sum()

    eager = {"fused_linear_log_probs": log_probs, "fused_linear_divergence": divergence,
             "fused_linear_cross_entropy": cross_entropy}  # fmt: skip
    before = {name: getattr(F, name) for name in eager}
    vars(F).update(eager)
    try:
        yield
    finally:
        vars(F).update(before)


# ---- Measuring


def measured(batch: Batch, loss: Callable[[Batch], Tensor], clock: Any, rounds: int) -> dict[str, Any]:
    leaves = [t for t in (batch.hidden, batch.weight) if t.requires_grad]

    def step(_: Any) -> Any:
        return torch.autograd.grad(loss(batch), leaves)

    clock.samples(lambda: None, step, 2)
    times = clock.samples(lambda: None, step, rounds)
    peak = clock.peak_bytes(lambda: None, step)
    clock.release()
    return {"loss": float(loss(batch)), "ms": statistics.median(times) / 1e3, "peak_mib": peak / MIB}


def draw(machine: dict[str, Any], records: list[dict[str, Any]], path: Any, title: str) -> None:
    good = [r for r in records if "error" not in r]
    names, providers = list(dict.fromkeys(r["name"] for r in good)), list(dict.fromkeys(r["provider"] for r in good))
    providers.sort(key=lambda p: not plots.is_ours(p))
    height = 0.6 + 0.2 * (len(providers) + 0.8) * len(names)
    title = f"{plots.machine_name([machine])}: {title} ({plots.LOWER})"
    with plots.figure_of(path, title, 1, 2, height, providers, "s", sharey=True) as (_, (axes,)):
        for axis, field, label in ((axes[0], "ms", "time, ms"), (axes[1], "peak_mib", "peak above the inputs, MiB")):
            values = {(r["name"], r["provider"]): r[field] for r in good}
            plots.bar_panel(axis, names, providers, values, "{:,.1f}".format)
            axis.set_title(label)


def table(records: list[dict[str, Any]]) -> str:
    rows = [[r["name"], r["provider"], *([r["error"], "", ""] if "error" in r else
             [f"{r['ms']:.2f}", f"{r['peak_mib']:,.0f}", f"{r['loss']:.5f}"])] for r in records]  # fmt: skip
    return grid(["loss", "provider", "ms", "peak MiB", "value"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.post_training", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", type=shape_of, help="default: 8x1024x4096x151936, on a CPU 4x16x32x512")
    parser.add_argument("--losses", nargs="+", choices=ours(), default=list(ours()))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=PROVIDERS)
    parser.add_argument("--frozen-head", action="store_true", help="no gradient of the weight, as under LoRA")
    parser.add_argument("--rounds", type=positive, default=10)
    add_out(parser)
    arguments = parser.parse_args()
    shape = arguments.shape or SHAPES[arguments.device]
    clock = CudaClock() if arguments.device == "cuda" else CpuClock()
    batch = Batch(shape, arguments.device, arguments.frozen_head)
    machine = describe(arguments.device) | {"shape": shape, "frozen_head": arguments.frozen_head}
    records: list[dict[str, Any]] = []
    for provider in arguments.providers:
        for name in arguments.losses:
            if provider == "torch" and name == "cosine":
                continue  # calls no operator
            record: dict[str, Any] = {"kind": "loss", "provider": provider, "name": name}
            try:
                loss = liger_kernels()[name] if provider == "liger-kernel" else ours()[name]
                with all_logits() if provider == "torch" else nullcontext():
                    record |= measured(batch, loss, clock, arguments.rounds)
            except (ImportError, torch.OutOfMemoryError) as error:
                record["error"] = type(error).__name__
                clock.release()
            records.append(record)
            print(record, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{slug(arguments.device)}-post-training{'-frozen-head' if arguments.frozen_head else ''}"
    lines = [json.dumps(r, ensure_ascii=False) for r in (machine, *records)]
    stem.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    what = f"{'×'.join(map(str, shape))}, the head {'frozen' if arguments.frozen_head else 'trained'}"
    text = (
        f"# Post-training losses\n\nForward and backward, {what}.\n\n![losses]({stem.name}.png)\n\n{table(records)}\n"
    )
    stem.with_suffix(".md").write_text(text)
    print(table(records))
    try:
        draw(machine, records, stem.with_suffix(".png"), f"post-training losses, {what}")
    except ImportError:
        print("No plot: matplotlib is not installed.")


if __name__ == "__main__":
    main()
