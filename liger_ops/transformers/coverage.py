"""What a report says about the whole model: modules with parameters of which no other row speaks, and the share of the
parameters that operators read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from ..linear.project import is_projection
from . import rewrite
from .heads import head_of, output_embedding
from .patched import inner_function

# What an operator of a row of this kind computes.
EVERYTHING_BELOW = ("norm", "mlp", "activation", "router", "experts", "connection", "embedding", "lora", "linear")
# Kinds whose rows also speak of the plain layers that their modules hold.
HOLDERS = ("rope", "conv", "gate")
# Kinds whose rows speak of what a module does with its children.
OF_CODE = ("layer", "packing", "loss")
# Kinds of modules without an operator, by a part of the name of their class.
NAMED = ("router", "experts", "attention", "mlp")
NO_OPERATOR = "is of no kind that operators replace"


class Row(NamedTuple):
    module: str  # path in the model
    type: str  # name of the class
    # "layer", "norm", "mlp", "activation", "router", "experts", "gate", "rope", "conv", "packing", "connection",
    # "embedding", "lora", "linear" or "loss"; without an operator also "attention" or "other"
    kind: str
    replacement: str  # the operator that computes it now, or ""
    reason: str  # why it was left alone, or why no larger operator replaces it, or ""


# ---- Modules without a row


def parent_of(path: str) -> str:
    return path.rpartition(".")[0]


def ancestors_of(path: str) -> Iterator[str]:
    while path:
        path = parent_of(path)
        yield path


def is_plain_layer(module: nn.Module) -> bool:
    """Whether the name of the module's class says less than that of the module that holds it."""
    return type(module).__module__.startswith("torch.nn.") or hasattr(module, "in_features")


def holds_layers_only(module: nn.Module) -> bool:
    """Whether the module computes with its children, and these have none."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and not any(
        [*child.children()] for child in module.children()
    )


def is_flat(parameter: Any) -> bool:
    """Whether FSDP1 has put the parameters of several modules into this one."""
    return getattr(parameter, "_is_flat_param", False)


def others(model: nn.Module, rows: Iterable[Row]) -> list[Row]:
    """Rows of the modules that have parameters and that no row speaks of."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(row.module, set()).add(row.kind)
    modules, head = dict(model.named_modules()), output_embedding(model)
    head_parts = {id(part) for part in head.modules()} if head is not None else set()
    found: dict[str, Row] = {}
    for path, module in modules.items():
        # Wrappers hold the parameters of what they wrap.
        if not any(p is not None and not is_flat(p) for p in module._parameters.values()):
            continue
        if id(module) in head_parts or type(module).__module__.startswith("torch.distributed."):
            continue
        if kinds.get(path, set()) - {*OF_CODE}:
            continue
        above = [*ancestors_of(path)]
        if any(kinds.get(outer, set()) & {*EVERYTHING_BELOW} for outer in above):
            continue
        if is_plain_layer(module) and above:
            if kinds.get(above[0], set()) & {*HOLDERS}:
                continue
            if above[0] and not kinds.get(above[0]) and holds_layers_only(modules[above[0]]):
                path, module = above[0], modules[above[0]]
        name = type(module).__name__
        kind = next((kind for kind in NAMED if kind in name.lower()), "other")
        found.setdefault(path, Row(path, name, kind, "", NO_OPERATOR))
    return [*found.values()]


# ---- The share of the parameters


class Coverage(NamedTuple):
    """Numbers of parameters and of their bytes: of the model, and of what operators read."""

    parameters: int
    covered_parameters: int
    bytes: int
    covered_bytes: int

    def __str__(self) -> str:
        pairs = ((self.covered_parameters, self.parameters), (self.covered_bytes, self.bytes))
        # Rounded down: 100 % means all.
        shares = (f"{1000 * part // max(whole, 1) / 10:g} %" for part, whole in pairs)
        return "operators cover {} of the parameters and {} of their bytes".format(*shares)


def projected(module: nn.Module) -> Iterator[nn.Module]:
    """The projections of a patched attention that its rewritten methods do not call themselves."""
    cls = next(c for c in type(module).__mro__ if "liger_original" in vars(c))
    functions = [inner_function(value) for value in vars(cls).values() if callable(value)]
    names = [rewrite.names_in(f.__code__) for f in functions if hasattr(f, "__code__")]
    for name, child in module.named_children():
        if is_projection(child) and any({rewrite.PROJECT, name} <= used for used in names):
            yield child


def read_by_operators(model: nn.Module, row: Row) -> Iterator[nn.Parameter]:
    module = model.get_submodule(row.module)
    if row.kind in EVERYTHING_BELOW:
        yield from module.parameters()
    elif row.kind == "rope":
        for child in projected(module):
            yield from child.parameters()
    elif row.kind == "conv":
        yield from (p for child in module.children() if isinstance(child, nn.Conv1d) for p in child.parameters())
        if "delta_gates" in row.replacement:
            yield from (p for name in ("A_log", "dt_bias") if (p := module._parameters.get(name)) is not None)
    elif row.kind == "loss" and row.replacement.startswith("fused_linear_cross_entropy"):
        yield from head_of(model).parameters()


def size_of(parameter: Any) -> int:
    # DeepSpeed's ZeRO-3 leaves no elements in a parameter that is not gathered.
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def coverage_of(model: nn.Module, rows: Iterable[Row]) -> Coverage | None:
    """None if the model's parameters are not those of its modules, as under FSDP1."""
    every = {id(p): p for p in model.parameters()}
    if any(map(is_flat, every.values())):
        return None
    read = {id(p): p for row in rows if row.replacement for p in read_by_operators(model, row)}
    sums = [
        sum(size_of(p) * factor(p) for p in found.values())
        for factor in (lambda p: 1, lambda p: p.element_size())
        for found in (every, read)
    ]
    return Coverage(*sums)
