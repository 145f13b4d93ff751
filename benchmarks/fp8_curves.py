"""python -m benchmarks.fp8_curves: the same training in bf16 and in FP8.

The small Llama of benchmarks.loss_curves learns a fixed Markov chain. Runs of one seed begin with the same weights and see the
same batches. The bar: the final loss with the recipe "rows" is at most 0.5 % above that in bf16, for every seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks import plots
from benchmarks.arguments import positive
from benchmarks.loss_curves import SIZES, Size, distance, end, keep, ours, parser_of, train
from benchmarks.machine import describe, slug

LIMIT = 0.005
PLAIN = "bf16"
# About 100 million parameters on a GPU.
LARGE = Size(layers=8, hidden=1024, heads=16, intermediate=2816, vocabulary=8192, batch=8, sequence=1024)
COLORS = {
    PLAIN: "black",
    "rows": "ours",
    "rows_hp": "ours rows_hp",
    "tensor": "ours tensor",
    "blocks": "ours blocks",
    "torchao": "torchao",
    "torchao_hp": "torchao rows_hp",
}


def in_fp8(recipe: str) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        from liger_ops.transformers import apply_liger_kernel

        report = apply_liger_kernel(model, fp8=recipe, fp8_filter=lambda module, name: name != "head")
        assert any(row.kind == "linear" and row.replacement for row in report.rows), f"no layer fits {recipe}"

    return prepare


def by_torchao(recipe: str) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")

    return prepare


PROVIDERS: dict[str, Callable[[nn.Module], None]] = {
    PLAIN: lambda model: None,
    "rows": in_fp8("rows"),
    "rows_hp": in_fp8("rows_hp"),
    "tensor": in_fp8("tensor"),
    "blocks": in_fp8("blocks"),
    "torchao": by_torchao("rowwise"),
    "torchao_hp": by_torchao("rowwise_with_gw_hp"),
}


def draw(record: dict[str, Any], path: Path) -> None:
    title = f"{plots.machine_name([record])}: loss of a small Llama in bf16 and in FP8"
    with plots.figure_of(path, title, 2, 1, 6.2, sharex=True) as (_, axes):
        top, bottom = axes[:, 0]
        for seed, curves in enumerate(record["curves"]):
            for name, losses in curves.items():
                color = COLORS[name] if name == PLAIN else plots.color(COLORS[name])
                top.plot(losses, color=color, lw=1.1, label=name if seed == 0 else None)
                if name != PLAIN:
                    bottom.plot([a / b - 1 for a, b in zip(losses, curves[PLAIN])], color=color, lw=1.1)
        top.set_ylabel("loss")
        top.legend()
        bottom.axhline(LIMIT, color="gray", lw=0.8)
        bottom.set_ylabel("above bf16, of the loss")
        bottom.set_xlabel("step")


def main() -> int:
    import liger_ops  # noqa: F401

    parser = parser_of("fp8_curves", __doc__, 300)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--providers", default=f"{PLAIN},rows,rows_hp,tensor", help=f"of {', '.join(PROVIDERS)}")
    args = parser.parse_args()
    if args.redraw:
        draw(json.loads(args.redraw.read_text()), args.redraw.with_suffix(".png"))
        return 0
    names = [PLAIN, *(name for name in args.providers.split(",") if name != PLAIN)]
    if unknown := set(names) - PROVIDERS.keys():
        parser.error(f"--providers must be among {','.join(PROVIDERS)} (got {','.join(sorted(unknown))})")
    size = SIZES["cpu"] if args.device == "cpu" else LARGE

    settings = describe(args.device) | {"steps": args.steps, "rate": args.rate, **vars(size)}
    curves: list[dict[str, list[float]]] = []
    for seed in range(args.seeds):
        losses: dict[str, list[float]] = {}
        for name in names:
            losses[name] = train(size, ours, args.steps, seed, args.device, args.rate, PROVIDERS[name])
            above = end(losses[name]) / end(losses[PLAIN]) - 1
            far = distance(losses[name], losses[PLAIN])["largest"]
            print(f"seed {seed} {name:10} first {losses[name][0]:.4f}, end {end(losses[name]):.4f}: {above:+.2%} of bf16, "
                  f"at most {far:.3f} apart", flush=True)  # fmt: skip
        curves.append(losses)
        worst = {name: max(end(c[name]) / end(c[PLAIN]) - 1 for c in curves) for name in names[1:]}
        # After each seed, so that a limit of time leaves something.
        keep(settings | {"curves": curves, "above bf16": worst}, args.out, f"{slug(args.device)}-fp8-curves", draw)
    ends = [end(c[PLAIN]) for c in curves]
    print(f"bf16 ends from {min(ends):.4f} to {max(ends):.4f}")
    for name, above in worst.items():
        print(f"{name}: at most {above:+.2%}, {'within' if above <= LIMIT else 'OUTSIDE'} {LIMIT:.1%}")
    return int(any(worst[name] > LIMIT for name in worst if name == "rows"))


if __name__ == "__main__":
    raise SystemExit(main())
