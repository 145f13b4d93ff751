"""python -m benchmarks.loss_curves: the same training with eager cross entropy and with fused_linear_cross_entropy.

A small Llama learns a fixed Markov chain in bf16, always from the same weights and batches. Rounding alone makes eager
runs differ: with the head's classes in another order, losses and gradients are the same sums in another order. Ours, with
any number of chunks, should differ from eager no more than these runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import plots
from benchmarks.arguments import add_out, positive
from benchmarks.fused_linear_cross_entropy import budget_for_chunks
from benchmarks.machine import describe, slug

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (hidden states, head, targets)
CHUNKS = 16
SUCCESSORS = 4  # of every class in the chain
RATE = 1e-3
END = 20  # the last steps, whose mean is the final loss


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    sequence: int


SIZES = {
    "cpu": Size(layers=2, hidden=64, heads=4, intermediate=176, vocabulary=1024, batch=4, sequence=64),
    "cuda": Size(layers=4, hidden=1024, heads=16, intermediate=2816, vocabulary=128256, batch=8, sequence=1024),
}


class RmsNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Layer(nn.Module):
    def __init__(self, s: Size) -> None:
        super().__init__()
        self.heads = s.heads
        self.before_attention, self.before_mlp = RmsNorm(s.hidden), RmsNorm(s.hidden)
        self.qkv = nn.Linear(s.hidden, 3 * s.hidden, bias=False)
        self.out = nn.Linear(s.hidden, s.hidden, bias=False)
        self.gate_up = nn.Linear(s.hidden, 2 * s.intermediate, bias=False)
        self.down = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = (
            t.view(batch, sequence, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.before_attention(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Computes the hidden states that enter the head. The caller applies the loss."""

    def __init__(self, s: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RmsNorm(s.hidden)
        self.head = nn.Linear(s.hidden, s.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        width = s.hidden // s.heads
        turns = torch.outer(torch.arange(s.sequence), 1e4 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.norm(x)


class Chain:
    """A Markov chain: every class has a few successors, the first of which is the likeliest."""

    def __init__(self, s: Size, seed: int) -> None:
        self.s = s
        self.generator = torch.Generator().manual_seed(seed)
        # Few classes are common, as in text. Otherwise a short training sees most of them only once.
        self.common = min(s.vocabulary, 512)
        self.classes = torch.randperm(s.vocabulary, generator=self.generator)[: self.common]
        self.next = torch.randint(self.common, (self.common, SUCCESSORS), generator=self.generator)
        self.odds = torch.tensor([8.0, 4.0, 2.0, 1.0])

    def batches(self, steps: int) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, each (steps, batch, sequence)."""
        shape = (self.s.sequence, steps * self.s.batch)
        ways = torch.multinomial(self.odds, math.prod(shape), True, generator=self.generator).view(shape)
        chosen = [torch.randint(self.common, shape[1:], generator=self.generator)]
        for way in ways:
            chosen.append(self.next[chosen[-1], way])
        tokens = self.classes[torch.stack(chosen, 1)].view(steps, self.s.batch, -1)
        return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()


def eager(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden.flatten(0, -2), head)
    return F.cross_entropy(logits.float(), target.flatten())


def eager_in_another_order(seed: int) -> Loss:
    """Permutes the classes and the targets."""

    def loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        generator = torch.Generator(head.device).manual_seed(seed)
        order = torch.randperm(len(head), generator=generator, device=head.device)
        logits = F.linear(hidden.flatten(0, -2), head[order])
        return F.cross_entropy(logits.float(), order.argsort()[target.flatten()])

    return loss


def ours(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    return torch.ops.liger.fused_linear_cross_entropy(hidden, head, target)


def ours_in_chunks(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    budget = budget_for_chunks(CHUNKS, target.numel(), hidden.shape[-1], len(head), hidden.dtype)
    return torch.ops.liger.fused_linear_cross_entropy(hidden, head, target, memory_budget=budget)


def learning_rate(step: int, steps: int, highest: float) -> float:
    warm = min(1.0, (step + 1) / max(1, steps // 10))
    return highest * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(
    s: Size, loss_of: Loss, steps: int, seed: int, device: str, rate: float = RATE,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> list[float]:  # fmt: skip
    torch.manual_seed(seed)
    model = Llama(s).to(device, torch.bfloat16)
    prepare(model)
    batches = [t.to(device) for t in Chain(s, seed).batches(steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01)
    losses = []
    for step, (tokens, target) in enumerate(zip(*batches)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, rate)
        loss = loss_of(model(tokens), model.head.weight, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def end(losses: list[float]) -> float:
    return sum(losses[-END:]) / len(losses[-END:])


def distance(a: list[float], b: list[float]) -> dict[str, float]:
    away = [abs(x - y) for x, y in zip(a, b)]
    return {
        "largest": max(away), "step": away.index(max(away)), "mean": sum(away) / len(away), "end": abs(end(a) - end(b))
    }  # fmt: skip


def draw(record: dict[str, Any], path: Path) -> None:
    curves = record["curves"]
    orders = sum(name.startswith("eager, order") for name in curves)
    labels = {"eager": "eager", "eager, order 1": f"eager, classes in another order ({orders} runs)"}
    labels |= {name: name for name in curves if name.startswith("ours")}
    title = f"{plots.machine_name([record])}: loss of a small Llama"
    with plots.figure_of(path, title, 2, 1, 6.2, sharex=True) as (_, axes):
        top, bottom = axes[:, 0]
        for name, losses in curves.items():
            mine = name.startswith("ours")
            color = plots.color("ours" if name == "ours" else "ours 16 chunks") if mine else plots.color("torch")
            style = {
                "color": "black" if name == "eager" else color,
                "lw": 2.0 if mine else 1.1,
                "zorder": 3 if mine else 2,
            }
            top.plot(losses, label=labels.get(name), **style)
            if name != "eager":
                bottom.plot([abs(x - y) for x, y in zip(losses, curves["eager"])], **style)
        top.set_ylabel("loss")
        top.legend()
        bottom.set_ylabel("difference from the eager loss")
        bottom.set_yscale("symlog", linthresh=1e-4)
        bottom.set_xlabel("step")


def parser_of(module: str, description: str | None, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=positive, default=steps)
    parser.add_argument("--rate", type=float, default=RATE, help="maximum learning rate")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="only draw an earlier run again")
    add_out(parser)
    return parser


def keep(record: dict[str, Any], folder: Path, name: str, draw: Callable[[dict[str, Any], Path], None]) -> None:
    """Writes the record, and its picture if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n")
    try:
        draw(record, file.with_suffix(".png"))
    except ImportError:
        print("No plot: matplotlib is not installed.")


def main() -> int:
    import liger_ops  # noqa: F401

    parser = parser_of("loss_curves", __doc__, 200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--orders", type=positive, default=2, help="eager runs with classes in another order")
    args = parser.parse_args()
    if args.redraw:
        draw(json.loads(args.redraw.read_text()), args.redraw.with_suffix(".png"))
        return 0
    size = SIZES[args.device]
    losses: dict[str, Loss] = {"eager": eager}
    losses |= {f"eager, order {i + 1}": eager_in_another_order(i + 1) for i in range(args.orders)}
    losses |= {"ours": ours, f"ours, {CHUNKS} chunks": ours_in_chunks}

    record: dict[str, Any] = describe(args.device) | {
        "steps": args.steps,
        "seed": args.seed,
        "rate": args.rate,
        **vars(size),
    }
    curves: dict[str, list[float]] = {}
    away: dict[str, dict[str, float]] = {}
    for name, loss in losses.items():
        curves[name] = train(size, loss, args.steps, args.seed, args.device, args.rate)
        away[name] = distance(curves[name], curves["eager"])
        far = away[name]
        print(f"{name:16} first {curves[name][0]:.4f}, end {end(curves[name]):.4f}; from eager: at most {far['largest']:.2e} "
              f"(step {far['step']}), {far['mean']:.2e} on average, {far['end']:.2e} at the end", flush=True)  # fmt: skip
    eagers = [curve for name, curve in curves.items() if name.startswith("eager")]
    apart = [distance(a, b) for a, b in combinations(eagers, 2)]
    noise = {key: max(far[key] for far in apart) for key in ("largest", "mean", "end")}
    # As in the tests: 1.5 times the difference between eager runs.
    verdicts = {
        name: "within" if all(far[key] <= 1.5 * noise[key] for key in noise) else "OUTSIDE"
        for name, far in away.items() if name.startswith("ours")
    }  # fmt: skip
    print(f"any two eager runs: at most {noise['largest']:.2e} apart, {noise['mean']:.2e} on average, "
          f"{noise['end']:.2e} at the end")  # fmt: skip
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict} 1.5 times that")
    record |= {"curves": curves, "from eager": away, "eager apart": noise, "verdicts": verdicts}
    keep(record, args.out, f"{slug(args.device)}-loss-curves", draw)
    return int("OUTSIDE" in verdicts.values())


if __name__ == "__main__":
    raise SystemExit(main())
