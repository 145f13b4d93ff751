"""Hypothesis strategies that draw calls of an operator from its declaration. Types and defaults come from the signature, shapes
and dtypes from the docstring (``x: (..., n), weight: (n,) in x's dtype or fp32``). What is special to one operator stands in
`vary(draw, arguments)` of its test file, which may change drawn arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.reference import Operator
from liger_ops.reference._calls import Shapes, fit, kinds_of, random_tensor, shapes_of
from tests.support import layouts
from tests.support.calls import SCALED, Dtypes
from tests.support.host.solo_group import solo_group

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Tensors of one number make results that are exactly 0, which have no relative error.
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda x, dim: x,
    **{name: change for name, change in layouts.LAYOUTS.items() if name != "one number"},
}
# Of options whose type alone does not say what fits.
OPTIONS: dict[str, st.SearchStrategy] = {
    "dilation": st.integers(1, 3),
    "sizes": st.lists(st.integers(0, 9), min_size=3, max_size=4),
    "groups": st.integers(1, 3),
    "padding_idx": st.sampled_from([None, 0, -1]),
    "lower_bound": st.sampled_from([None, -5.0]),
    "beta_scale": st.sampled_from([1.0, 2.0]),
    "sinkhorn": st.just(3),
    "memory_budget": st.sampled_from([None, 12_000]),
}
# By dimension letter; others are up to 3. Hypothesis draws them, also 0, and looks for the smallest that fail.
SIZES = {
    **dict.fromkeys("nmV", st.integers(1, 40)),
    "C": st.integers(0, 40),
    "W": st.integers(2, 8),
    "D": st.integers(1, 20).map(lambda half: 2 * half),
    **dict.fromkeys("rqd", st.integers(1, 9)),
}
PAIRS = ("low_rank_input", "low_rank_weight"), ("gate_up_a", "gate_up_b"), ("down_a", "down_b")


def draw_shapes(draw: st.DrawFn, options: dict[str, Any]) -> Shapes:
    which = draw(st.integers(0, 1))

    def size_of(letter: str) -> int:
        if letter == "R":  # columns of a head that are rotated
            return 2 * draw(st.integers(1, drawn.size("D") // 2))
        return draw(SIZES.get(letter, st.integers(0, 3)))

    def choose(written: Sequence[str]) -> str:
        """The same of all tensors that have alternatives."""
        return written[which % len(written)]

    drawn = Shapes(size_of, lambda: draw(st.lists(st.integers(0, 5), max_size=3)), choose, options)
    return drawn


def option(draw: st.DrawFn, operator: Operator, p: inspect.Parameter) -> Any:
    if p.name in OPTIONS:
        return draw(OPTIONS[p.name])
    if p.annotation == "Sequence[float]":
        return draw(st.lists(st.sampled_from([1.0, 0.5, -1.25]), max_size=3))
    default = 1e-4 if p.default is p.empty and p.annotation == "float" else p.default
    match p.annotation:
        case "str":
            return draw(st.sampled_from(operator.choices.get(p.name, [default])))
        case "bool":
            return draw(st.booleans())
        case "float":
            return draw(st.sampled_from([default, 0.125, 1.0]))
        case "float | None":
            return draw(st.sampled_from([default, 16.0]))
        case "int" if p.default is p.empty:
            return None  # set by `vary`
        case "int":
            return draw(st.sampled_from([default, 0] if default < 0 else [default]))
        case "int | None" | "Sequence[int] | None":
            return default
    raise TypeError(f"{operator.__name__}: there is no strategy for {p}")


def given_tensors(draw: st.DrawFn, operator: Operator) -> set[str]:
    given = {name for name, kind in kinds_of(operator).items() if kind == "Tensor?" and draw(st.booleans())}
    for name in {"seq_idx", "cu_seqlens"} & given:
        given -= {"seq_idx", "cu_seqlens"} - {name}
    for pair in PAIRS:
        for prefix in ("", "s_", "t_"):
            both = {prefix + name for name in pair}
            given -= set() if both <= given else both
    return given


def tensor(draw: st.DrawFn, operator: Operator, name: str, shapes: Shapes, shape: Sequence[int], dtype: torch.dtype):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    t = random_tensor(operator, name, shape, shapes.size, generator, SCALED)
    if t.dtype == torch.int64:
        ignore_index = shapes.options.get("ignore_index")
        if ignore_index is not None:
            ignored = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
            t = t.masked_fill(ignored, ignore_index)
        t = t.sort(-1).values if name == "seq_idx" else t
        t = t.to(draw(st.sampled_from([torch.int64, torch.int32])))
    elif t.is_complex():
        t = t.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    elif t.is_floating_point():
        t = t.to(dtype)
    if t.dim():
        t = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](t, draw(st.integers(0, t.dim() - 1)))
    requires_grad = t.is_floating_point() and name not in operator.constants and draw(st.integers(0, 3)) > 0
    return t.requires_grad_(requires_grad)


@st.composite
def calls(draw: st.DrawFn, operator: Operator) -> dict[str, Any]:
    """Arguments by name."""
    kinds, parameters = kinds_of(operator), operator.__signature__.parameters
    dtypes = Dtypes(operator, draw(st.sampled_from(DTYPES)), lambda: draw(st.booleans()))
    arguments = {name: option(draw, operator, p) for name, p in parameters.items() if "Tensor" not in kinds[name]}
    given, shapes = given_tensors(draw, operator), draw_shapes(draw, arguments)
    if operator.__name__.startswith("vocab_parallel"):
        arguments |= dict(group=solo_group(), classes=shapes.size("V"))
        given.discard("vocab_map")
    arguments |= dict.fromkeys(name for name, kind in kinds.items() if kind == "Tensor?")
    for name, shape in shapes_of(operator, shapes, given).items():
        is_list = kinds[name] == "Tensor[]"
        made = [tensor(draw, operator, name, shapes, of, dtypes.of(name)) for of in (shape if is_list else [shape])]
        arguments[name] = made if is_list else made[0]
    if arguments.get("biases") and draw(st.booleans()):
        arguments["biases"] = []
    if "cu_seqlens" in given and shapes.size("B") == 0:
        arguments["cu_seqlens"] = None
    fit(arguments)
    arguments = {name: arguments[name] for name in parameters if name in arguments}
    vary = getattr(own_test_file(operator), "vary", None)
    if vary is not None:
        vary(draw, arguments)
    return arguments


@cache
def own_test_file(operator: Operator) -> ModuleType:
    """The operator's own test file."""
    stem = f"test_{operator.__module__.rpartition('.')[2]}"
    (path,) = Path(__file__).parents[1].rglob(f"{stem}.py")
    spec = spec_from_file_location(stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
