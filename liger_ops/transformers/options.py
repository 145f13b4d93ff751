"""The options of apply_liger_kernel: those that a caller gives, and those in force on a model that is patched already."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..reference.fp8_projections import RECIPES
from .patched import Options, Patched

SWITCHES = (
    "rope", "rms_norm", "layer_norm", "swiglu", "geglu", "xielu", "sigmoid_gate", "causal_conv1d", "delta_gates", "moe_router",
    "moe_experts", "hyper_pre", "hyper_post", "embedding", "cross_entropy", "fused_linear_cross_entropy", "lora",
)  # fmt: skip
OPTIONS = (*SWITCHES, "memory_budget", "fp8", "fp8_filter")
DEFAULTS = Options(dict.fromkeys(SWITCHES, True), None)
# What torchao's Float8LinearConfig.from_recipe_name calls our recipes.
RECIPES_OF_TORCHAO = {"tensorwise": "tensor", "rowwise": "rows", "rowwise_with_gw_hp": "rows_hp"}


class Unchanged(enum.Enum):
    """The value of an option that is not given: that of the model if it is patched, else None."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED = Unchanged.UNCHANGED


def checked_options(function: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given."""
    given = {name: value for name, value in options.items() if value is not UNCHANGED}
    if unknown := sorted(given.keys() - set(OPTIONS)):
        raise TypeError(f"{function}: switches must be of {', '.join(SWITCHES)} (got {', '.join(unknown)})")
    for name in SWITCHES:
        if not isinstance(given.get(name, True), bool):
            raise TypeError(f"{function}: {name} must be True or False (got {given[name]!r})")
    memory_budget, fp8, fp8_filter = (given.get(name) for name in ("memory_budget", "fp8", "fp8_filter"))
    rule = f"{function}: memory_budget must be a positive number of bytes or None (got {memory_budget!r})"
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, int)):
        raise TypeError(rule)
    if memory_budget is not None and memory_budget <= 0:
        raise ValueError(rule)
    recipe = RECIPES_OF_TORCHAO.get(fp8, fp8) if isinstance(fp8, str) else fp8
    if recipe not in (None, *RECIPES):
        ours, theirs = (", ".join(map(repr, names)) for names in (RECIPES, RECIPES_OF_TORCHAO))
        raise ValueError(f"{function}: fp8 must be {ours}, torchao's {theirs}, or None (got {fp8!r})")
    if fp8_filter is not None and not callable(fp8_filter):
        raise TypeError(f"{function}: fp8_filter must be a function of a module and its name (got {fp8_filter!r})")
    if fp8_filter is not None and fp8 is None:
        raise ValueError(f"{function}: fp8_filter must be given with fp8 (got fp8=None)")
    # A filter belongs to the recipe that it came with.
    return given | {"fp8": recipe, "fp8_filter": fp8_filter} if "fp8" in given else given


def with_options(options: Options, given: Mapping[str, Any]) -> Options:
    """The options with the values of those that are given."""
    switches = {name: given.get(name, value) for name, value in options.switches.items()}
    others = {name: given[name] for name in ("memory_budget", "fp8", "fp8_filter") if name in given}
    return options._replace(switches=switches, **others)


# ---- Patched models


def options_in_force(model: nn.Module) -> Options:
    """The options with which the model was patched, or the defaults."""
    return model.__dict__.get("liger_options", DEFAULTS)


def changes_options(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a module was patched with another value of a given option."""
    kept = [module.__dict__["liger_options"] for module in model.modules() if "liger_options" in module.__dict__]
    return any(with_options(options, given) != options for options in kept)


def stays_out(module: nn.Module, name: str) -> bool:
    """Takes the place of a caller's fp8_filter, which not every pickle can hold: layers that it left out stay out."""
    return False


def keep_options(model: nn.Module, options: Options) -> None:
    kept = options if options.fp8_filter is None else options._replace(fp8_filter=stays_out)
    model.__dict__["liger_options"] = kept
    for module in model.modules():
        # The head is patched with its model.
        if isinstance(module, Patched) and type(module).liger_row[0] != "head":
            module.__dict__.setdefault("liger_options", kept)
