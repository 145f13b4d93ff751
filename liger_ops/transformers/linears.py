"""Linear layers in FP8: `fp8_linear` in place of torch's while the module trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import functional as F
from ..linear.peft import has_adapters
from ..linear.project import recipe_of
from ..reference.fp8_projections import multiple_of
from .heads import output_embedding
from .patched import give_subclass, has_replaced_forward, is_fully_sharded, is_plain_linear, original_class

Filter = Callable[[nn.Module, str], bool]
# Linear layers whose results choose experts.
ROUTERS = ("gate", "router")


def forward(self: Any, input: Tensor) -> Tensor:
    if recipe := recipe_of(self, input):
        return F.fp8_linear(input, self.weight, self.bias, recipe=recipe)
    return original_class(type(self)).forward(self, input)


def is_gathered(weight: Any) -> bool:
    """Whether a weight below fully_shard is whole, and no DTensor, while its module runs. That of tensor parallelism is split
    over another dimension of its mesh, too."""
    placements: Any = getattr(weight, "placements", ())
    return bool(placements) and placements[-1].is_shard(0) and all(p.is_replicate() for p in placements[:-1])


def why_not(linear: nn.Linear, recipe: str, sharded: bool = False) -> str:
    """Why a linear layer cannot be computed in FP8, or "". sharded: whether fully_shard manages its weight."""
    if has_replaced_forward(linear):
        return "its forward was replaced"
    if type(linear.weight) not in (nn.Parameter, Tensor) and not (sharded and is_gathered(linear.weight)):
        return f"its weight is {type(linear.weight).__name__}"
    if not linear.weight.is_floating_point() or linear.weight.dtype.itemsize == 1:
        return f"its weight is in {linear.weight.dtype}"
    sizes, multiple = (linear.in_features, linear.out_features), multiple_of(recipe)
    if any(size % multiple for size in sizes):
        return f"its sizes, {sizes[0]} and {sizes[1]}, must be multiples of {multiple}"
    return ""


def patch(linear: nn.Linear, recipe: str) -> str:
    replacement = f"fp8_linear, {recipe}"
    give_subclass(linear, "linear", replacement, recipe, lambda cls: {"forward": forward, "liger_fp8": recipe})
    return replacement


def chosen(model: nn.Module, recipe: str, wanted: Filter | None) -> list[tuple[str, nn.Linear, str]]:
    """The path and the module of each plain linear layer but the head, and why it is left alone, or ""."""
    head = output_embedding(model)
    head_parts = {id(part) for part in head.modules()} if head is not None else set()
    adapted = [path for path, module in model.named_modules() if has_adapters(module)]
    groups = [path for path, module in model.named_modules() if is_fully_sharded(module)]
    found = []
    for path, module in model.named_modules():
        if not is_plain_linear(module) or id(module) in head_parts:
            continue
        sharded = any(path == group or not group or path.startswith(f"{group}.") for group in groups)
        reason = why_not(module, recipe, sharded)
        if any(path.startswith(f"{outer}.") and path != f"{outer}.base_layer" for outer in adapted):
            reason = "is an adapter"
        elif path.rpartition(".")[2] in ROUTERS:
            reason = "may choose experts"
        elif wanted is not None and not wanted(module, path):
            reason = "fp8_filter leaves it out"
        found.append((path, module, reason))
    return found
