"""Example calls of every operator: with and without its optional tensors, and with other values of its options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference import Operator
from ..reference._calls import Shapes, described_tensors, numbers
from ..reference._documentation import Described
from ..reference._operator import SCHEMA_TYPES
from ..reference.fp8_projections import multiple_of

# By dimension letter. Few are multiples of a tile, and rows are 16-byte aligned.
SIZES = dict(
    B=2, Hq=4, Hk=2, S=17, D=64, R=32, n=64, m=48, V=320, K=2, k=2, r=4, q=3, T=40, N=40, E=4, I=24, H=32, C=48, W=4,
    P=3, d=8,
)  # fmt: skip
LEADING = [2, 17]
WEIGHTS = ("(V, ", "(m, ", "(E, ", "(r, ")
ADAPTERS = 2
# Values for options that have no choices.
OTHER_VALUES: dict[str, Any] = {"float": 0.5, "float?": 16.0}
# Options that keep their default: memory and split classes, and those that change what the tensors mean.
KEPT = (
    "memory_budget",
    "group",
    "classes",
    "class_sizes",
    "sequence_dim",
    "mrope_section",
    "ignore_index",
    "padding_idx",
)
REQUIRED: dict[str, Any] = {"int": 2, "float": 1e-3, "float[]": [0.5, 2.0], "int[]": [8, 8, 32, 16]}


class Call(NamedTuple):
    text: str  # the options that differ from the defaults
    arguments: dict[str, Any]


def options(operator: Operator) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Of each call: their text, whether optional tensors are given, and their values."""
    parameters = operator.__signature__.parameters.values()
    kinds = {p.name: SCHEMA_TYPES[operator.types[p.name]] for p in parameters}
    free = [p for p in parameters if p.name not in KEPT and p.default is not p.empty and "Tensor" not in kinds[p.name]]
    yield "", True, {}
    if any(kind == "Tensor?" for kind in kinds.values()):
        yield "without optional tensors", False, {}
    if "cu_seqlens" in kinds:
        yield "cu_seqlens", True, {"seq_idx": None}
    for name, values in operator.choices.items():
        for value in values:
            if value != operator.__signature__.parameters[name].default:
                yield f"{name}={value}", True, {name: value}
    others = {p.name: OTHER_VALUES[kinds[p.name]] for p in free if kinds[p.name] in OTHER_VALUES}
    others |= {p.name: not p.default for p in free if kinds[p.name] == "bool"}
    if others:
        yield ", ".join(f"{name}={value}" for name, value in others.items()), True, others


def indices(operator: Operator, name: str, shapes: Shapes, shape: list[int], generator: torch.Generator) -> Tensor:
    if name == "tokens_per_expert":
        return torch.full(shape, shapes.size("N") // shapes.size("E"))
    written = " ".join(t.shapes for t in described_tensors(operator).values())
    # Of classes, of logits' columns, or of experts and samples.
    letter = next((letter for letter in "VEn" if letter in written), "E")
    t = torch.randint(shapes.size(letter), shape, generator=generator)
    if "ignore_index" in operator.types:
        t.view(-1)[::5] = operator.__signature__.parameters["ignore_index"].default
    return t


def distributions(name: str, arguments: dict[str, Any]) -> None:
    """Makes rows probabilities, or their logarithms."""
    as_log = {"input": name != "tvd", "target": name == "jsd" or arguments.get("log_target", False)}
    for argument, is_log in as_log.items():
        rows = arguments[argument].log_softmax(-1)
        arguments[argument] = rows if is_log else rows.exp()


def packed_samples(arguments: dict[str, Any]) -> None:
    """Samples by numbers of their rows, or, without these, by their ends, in one batch."""
    if arguments["seq_idx"] is not None:
        arguments["cu_seqlens"] = None
        return
    length = arguments["x" if "x" in arguments else "bcx"].shape[1]
    arguments["cu_seqlens"] = torch.tensor([0, length // 3, length // 3, length])
    for name in {"x", "bcx", "initial_state"} & arguments.keys():
        arguments[name] = arguments[name][:1]


def without_conflicts(arguments: dict[str, Any]) -> None:
    """Drops tensors that other options exclude, and turns weights that an option expects turned."""
    if arguments.get("beta") and "vocab_map" in arguments:
        arguments["vocab_map"] = None
    if arguments.get("weight_before"):
        arguments["gate_up_bias"] = None
    if "experts" in arguments:
        # Rounded scores may choose other experts than exact ones.
        arguments["bias" if arguments.get("score") == "sqrtsoftplus" else "experts"] = None
    if "cu_seqlens" in arguments:
        packed_samples(arguments)
    if arguments.get("transposed"):
        for name in ("gate_up", "down"):
            arguments[name] = arguments[name].transpose(1, 2).contiguous()


def floats(operator: Operator, name: str, described: Described, shape: list[int], generator: torch.Generator) -> Tensor:
    t = numbers(operator, name, described, shape, generator)
    has_exact_sums = "predicted_tokens" in getattr(operator.result, "_fields", ())
    # GEMMs of rows and weights stay near one.
    return t if has_exact_sums or not described.shapes.startswith(WEIGHTS) else t / shape[-1] ** 0.5


def call(
    operator: Operator,
    with_optional: bool,
    values: dict[str, Any],
    size_of: Callable[[str], int] = SIZES.__getitem__,
    leading: list[int] = LEADING,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments in fp64 on CPU. Tensors that may require a gradient do. values: of options."""
    parameters = operator.__signature__.parameters
    kinds = {name: SCHEMA_TYPES[operator.types[name]] for name in parameters}
    required = {name for name, p in parameters.items() if p.default is p.empty}
    generator = torch.Generator().manual_seed(seed)
    shapes = Shapes(size_of, lambda: leading, lambda written: written[-1])
    made: dict[str, Any] = {name: REQUIRED[kinds[name]] for name in required if kinds[name] in REQUIRED} | values
    for name, described in described_tensors(operator).items():
        shape = shapes.shape(described.shapes)
        if name in values:
            continue
        if kinds[name] == "Tensor?" and not with_optional:
            # Without a default, None must be given.
            made |= {name: None} if name in required else {}
        elif kinds[name] == "Tensor[]":
            made[name] = [floats(operator, name, described, shape, generator) for _ in range(ADAPTERS)]
        elif described.is_of("indices"):
            made[name] = indices(operator, name, shapes, shape, generator)
        else:
            t = floats(operator, name, described, shape, generator)
            made[name] = t > -0.5 if described.is_of("bool") else t
    if operator.__name__ in ("kl_div", "jsd", "tvd"):
        distributions(operator.__name__, made)
    without_conflicts(made)
    for name, value in made.items():
        for t in value if isinstance(value, list) else [value]:
            if isinstance(t, Tensor) and t.is_floating_point():
                t.requires_grad_(name not in operator.constants)
    return made


def sizes_of(values: dict[str, Any]) -> Callable[[str], int]:
    """Sizes that fit the options: some recipes take features in larger multiples."""
    multiple = multiple_of(values["recipe"]) if "recipe" in values else 1
    return lambda letter: -(-SIZES[letter] // multiple) * multiple if letter in "nm" else SIZES[letter]


def calls(operator: Operator) -> Iterator[Call]:
    for text, with_optional, values in options(operator):
        yield Call(text, call(operator, with_optional, values, sizes_of(values)))
