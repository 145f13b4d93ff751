"""Calls of an operator, made from its declaration: shapes and values of the tensors that its documentation describes, with
and without the optional ones, and with other values of its options. The doctor, tests and benchmarks read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._documentation import Described, documentation
from ._operator import SCHEMA_TYPES, Operator
from .fp8_projections import multiple_of

# By dimension letter. Few are multiples of a tile, and rows are 16-byte aligned.
SIZES = dict(
    B=2, Hq=4, Hk=2, S=17, D=64, R=32, n=64, m=48, V=320, K=2, r=4, q=3, T=40, N=40, E=4, I=24, H=32, C=48, W=4, d=8,
)  # fmt: skip
LEADING = [2, 17]
# Of tensors in a list.
LISTED = 2
WEIGHTS = ("(V, ", "(m, ", "(E, ", "(r, ")
# Of options that have no default.
REQUIRED: dict[str, Any] = {"int": 2, "float": 1e-3, "float[]": [0.5, 2.0], "int[]": [8, 8, 32, 16]}
# Of options that have no choices.
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


# ---- Shapes


class Shapes:
    """The shapes of one call. Every dimension letter has one size in it."""

    def __init__(
        self,
        size_of: Callable[[str], Any],
        leading: Callable[[], Sequence[Any]],
        choose: Callable[[Sequence[str]], str],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """size_of: a letter. leading: the sizes for "...". choose: one of the alternatives that the text gives. options: those
        that sizes must fit."""
        self.size_of, self.leading, self.choose, self.options = size_of, leading, choose, options or {}
        self.sizes: dict[str, Any] = {}
        self.dimensions: Sequence[Any] | None = None  # of "..."
        self.known: dict[str, list[Any]] = {}

    def size(self, letter: str) -> Any:
        if letter not in self.sizes:
            self.sizes[letter] = self._fitting(letter)
        return self.sizes[letter]

    def _fitting(self, letter: str) -> Any:
        options = self.options
        if letter == "P":  # rows ahead of the first
            return (self.size("W") - 1) * options.get("dilation", 1)
        if letter == "k" and options.get("top_k"):
            return options["top_k"]
        if letter in "nm" and options.get("sizes"):  # of a projection, of which the last part is not convolved
            parts = options["sizes"]
            return options.get("groups", 1) * sum(parts if letter == "n" else parts[:3])
        size = self.size_of(letter)
        if letter in "nm" and "recipe" in options:
            multiple = multiple_of(options["recipe"])
            return -(-size // multiple) * multiple
        return size

    def dimension(self, written: str) -> Sequence[Any]:
        if written == "...":
            self.dimensions = self.leading() if self.dimensions is None else self.dimensions
            return self.dimensions
        if " or " in written:
            written = self.choose(written.split(" or "))
        if written.isdigit():
            return [int(written)]
        parts = re.fullmatch(r"(?:(\d+) )?([A-Z][a-z]?|[a-z])(?: / (\d+))?", written)
        assert parts, written
        factor, letter, divisor = parts.groups()
        size = self.size(letter)
        return [int(factor or 1) * size // int(divisor or 1) if factor or divisor else size]

    def shape(self, written: str) -> list[Any]:
        """Tensors that are described together get the same shape."""
        if written not in self.known:
            chosen = self.choose(re.findall(r"\(([^)]*)\)", written))
            self.known[written] = [n for part in chosen.rstrip(",").split(", ") if part for n in self.dimension(part)]
        return self.known[written]

    def listed(self, written: str, own: Collection[str]) -> list[list[Any]]:
        """Of tensors in a list. own: the letters whose sizes differ in it."""
        scales, found = self.options.get("scale"), []
        for i in range(len(scales) if isinstance(scales, Sequence) else LISTED):

            def size_of(letter: str, times: int = i + 1) -> Any:
                return self.size(letter) * (times if letter in own else 1)

            found.append(Shapes(size_of, self.leading, self.choose).shape(written))
        return found


def described_tensors(operator: Operator) -> dict[str, Described]:
    """The tensor arguments."""
    return documentation(operator.alias_of or operator).tensors


def letters_of(operator: Operator, names: Collection[str] | None = None) -> set[str]:
    """Of the dimensions of all tensors, or of some."""
    described = described_tensors(operator)
    return set(re.findall("[A-Za-z]+", " ".join(described[n].shapes for n in (described if names is None else names))))


def kinds_of(operator: Operator) -> dict[str, str]:
    """Of the arguments, as schemas write them."""
    return {name: SCHEMA_TYPES[operator.types[name]] for name in operator.__signature__.parameters}


def shapes_of(operator: Operator, shapes: Shapes, given: Collection[str]) -> dict[str, list[Any]]:
    """Of the tensors that the call needs, and of the optional ones that are `given`; of a list, the shapes of its tensors."""
    kinds, described = kinds_of(operator), described_tensors(operator)
    lists = {name for name in described if kinds[name] == "Tensor[]"}
    own = letters_of(operator, lists) - letters_of(operator, described.keys() - lists)
    return {
        name: shapes.listed(described[name].shapes, own) if name in lists else shapes.shape(described[name].shapes)
        for name in kinds
        if name in described and (kinds[name] != "Tensor?" or name in given)
    }


# ---- Options and optional tensors


class Choice(NamedTuple):
    text: str  # what differs from all tensors and the default options
    given: tuple[str, ...]  # optional tensors
    values: dict[str, Any]  # of options


def optional_tensors(operator: Operator, values: Mapping[str, Any]) -> tuple[str, ...]:
    """That a call with these options may have together."""
    found = [name for name, kind in kinds_of(operator).items() if kind == "Tensor?"]
    excluded = {"cu_seqlens"} if "seq_idx" not in values else {"seq_idx"}
    # Rounded scores may choose other experts than exact ones.
    excluded |= {"bias" if values.get("score") == "sqrtsoftplus" else "experts"} if "score" in operator.types else set()
    excluded |= {"vocab_map"} if values.get("beta") else set()
    excluded |= {"gate_up_bias"} if values.get("weight_before") else set()
    return tuple(name for name in found if name not in excluded)


def required_options(operator: Operator) -> dict[str, Any]:
    parameters, kinds = operator.__signature__.parameters, kinds_of(operator)
    return {n: REQUIRED[kinds[n]] for n, p in parameters.items() if p.default is p.empty and kinds[n] in REQUIRED}


def choices(operator: Operator) -> Iterator[Choice]:
    parameters, kinds = operator.__signature__.parameters.values(), kinds_of(operator)
    free = [p for p in parameters if p.name not in KEPT and p.default is not p.empty and "Tensor" not in kinds[p.name]]

    def choice(text: str, values: dict[str, Any]) -> Choice:
        return Choice(text, optional_tensors(operator, values), values)

    yield choice("", {})
    if "Tensor?" in kinds.values():
        yield Choice("without optional tensors", (), {})
    if "cu_seqlens" in kinds:
        yield choice("cu_seqlens", {"seq_idx": None})
    for name, values in operator.choices.items():
        for value in values:
            if value != operator.__signature__.parameters[name].default:
                yield choice(f"{name}={value}", {name: value})
    others = {p.name: OTHER_VALUES[kinds[p.name]] for p in free if kinds[p.name] in OTHER_VALUES}
    others |= {p.name: not p.default for p in free if kinds[p.name] == "bool"}
    if others:
        yield choice(", ".join(f"{name}={value}" for name, value in others.items()), others)


# ---- Values


def is_never_negative(operator: Operator, name: str) -> bool:
    """Whether it weighs each class or token. Such weights are never negative."""
    shapes = described_tensors(operator)[name].shapes
    return name.endswith("weight") and name in operator.constants and shapes in ("(V,)", "(...)")


def letter_of_indices(operator: Operator) -> str:
    """The dimension that indices count: classes, experts, logits' columns, or samples."""
    letters = letters_of(operator)
    return next((letter for letter in "VEn" if letter in letters), "E")


def random_tensor(
    operator: Operator,
    name: str,
    shape: Sequence[int],
    size_of: Callable[[str], int],
    generator: torch.Generator | None = None,
    scaled: tuple[str, ...] = WEIGHTS,
) -> Tensor:
    """Random values of an argument, or of one tensor of a list: in fp64, complex, bool or int64. size_of: a dimension letter.
    scaled: the first dimensions of weights that are scaled so that GEMMs of rows and weights stay near one."""
    described = described_tensors(operator)[name]
    if name == "tokens_per_expert":  # of two thirds of the rows; the fewest first, which a layout may repeat
        rows, experts = size_of("N"), size_of("E")
        chosen = torch.randint(max(experts, 1), (rows - rows // 3,), generator=generator)
        return chosen.bincount(minlength=experts)[:experts].sort().values
    if described.is_of("indices"):
        return torch.randint(max(size_of(letter_of_indices(operator)), 1), shape, generator=generator)
    t = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
    if is_never_negative(operator, name):
        t = t.abs()
    elif "predicted_tokens" in getattr(operator.result, "_fields", ()):
        # Predictions must not depend on rounding: sums of these values are exact in every dtype.
        t = (2 * t).round().clamp(-4, 4) / 4
    elif described.shapes.startswith(scaled):
        t = t / shape[-1] ** 0.5
    if described.is_of("complex"):
        return torch.view_as_complex(t)
    t = t[..., 0].clone(memory_format=torch.contiguous_format)
    return t > -0.5 if described.is_of("bool") else t


def _distributions(name: str, arguments: dict[str, Any]) -> None:
    """Makes rows probabilities, or their logarithms."""
    as_log = {"input": name != "tvd", "target": name == "jsd" or arguments.get("log_target", False)}
    for argument, is_log in as_log.items():
        rows = arguments[argument].log_softmax(-1)
        arguments[argument] = rows if is_log else rows.exp()


def fit(arguments: dict[str, Any]) -> None:
    """Changes tensors as options expect them: samples by their ends stand in one batch, and weights may be turned."""
    if arguments.get("cu_seqlens") is not None:
        length = arguments["x" if "x" in arguments else "bcx"].shape[1]
        arguments["cu_seqlens"] = torch.tensor([0, length // 3, length // 3, length])
        for name in ("x", "bcx", "initial_state"):
            if arguments.get(name) is not None:
                arguments[name] = arguments[name][:1]
    if arguments.get("transposed"):
        for name in ("gate_up", "down"):
            t = arguments[name]
            arguments[name] = t.detach().transpose(1, 2).contiguous().requires_grad_(t.requires_grad)


class Call(NamedTuple):
    text: str  # the options that differ from the defaults
    arguments: dict[str, Any]


def call(
    operator: Operator,
    given: Collection[str],
    values: Mapping[str, Any],
    size_of: Callable[[str], int] = SIZES.__getitem__,
    leading: Sequence[int] = LEADING,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments in fp64 on CPU. Tensors that may require a gradient do. given: optional tensors. values: of options."""
    parameters, kinds = operator.__signature__.parameters, kinds_of(operator)
    made = required_options(operator) | dict(values)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    generator = torch.Generator().manual_seed(seed)
    shapes = Shapes(size_of, lambda: leading, lambda written: written[-1], defaults | made)
    for name, shape in shapes_of(operator, shapes, given).items():
        is_list = kinds[name] == "Tensor[]"
        tensors = [random_tensor(operator, name, of, shapes.size, generator) for of in (shape if is_list else [shape])]
        made[name] = tensors if is_list else tensors[0]
        if "ignore_index" in operator.types and made[name].dtype == torch.int64:
            made[name].view(-1)[::5] = defaults["ignore_index"]
    # Without a default, None must be given.
    made |= {name: None for name, p in parameters.items() if p.default is p.empty and name not in made}
    if operator.__name__ in ("kl_div", "jsd", "tvd"):
        _distributions(operator.__name__, made)
    fit(made)
    for name, value in made.items():
        for t in value if isinstance(value, list) else [value]:
            if isinstance(t, Tensor) and t.is_floating_point():
                t.requires_grad_(name not in operator.constants)
    return made


def calls(operator: Operator) -> Iterator[Call]:
    for text, given, values in choices(operator):
        yield Call(text, call(operator, given, values))
