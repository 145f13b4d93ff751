"""Hypothesis strategies that draw calls of an operator from its declaration. Types and defaults come from the
signature, shapes from the docstring (``x: (..., n), weight: (n,)``). An operator's test file may change the drawn
arguments in a function `vary(draw, arguments)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import layouts
import torch
from checks import HALF_TYPES, like
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.reference import Operator
from liger_ops.reference._calls import Shapes, described_tensors, numbers
from liger_ops.reference._documentation import Described

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Tensors of one number make results that are exactly 0, which have no relative error.
LAYOUTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "contiguous": lambda x, dim: x,
    **{name: change for name, change in layouts.LAYOUTS.items() if name != "one number"},
}


def shapes(draw: st.DrawFn) -> Shapes:
    def size_of(letter: str) -> int:
        if letter == "R":  # columns of a head that are rotated
            return 2 * draw(st.integers(1, drawn.size("D") // 2))
        if letter == "D":
            return 2 * draw(st.integers(1, 20))
        return draw(st.integers(1, 40) if letter in "nmV" else st.integers(0, 3))

    drawn = Shapes(
        size_of,
        lambda: draw(st.lists(st.integers(0, 5), max_size=3)),
        lambda written: draw(st.sampled_from(written)),
    )
    return drawn


def tensors_of(operator: Operator) -> dict[str, Described]:
    found = described_tensors(operator)
    wanted = {n for n, p in operator.__signature__.parameters.items() if "Tensor" in p.annotation}
    assert wanted == set(found), f"{operator.__name__}: its docstring must give a shape (name: (..., n)) of {wanted}"
    return found


def option(draw: st.DrawFn, operator: Operator, p: inspect.Parameter) -> Any:
    if p.default is p.empty:
        return None  # set by `vary`
    match p.annotation:
        case "str":
            return draw(st.sampled_from(operator.choices.get(p.name, [p.default])))
        case "bool":
            return draw(st.booleans())
        case "float":
            return draw(st.sampled_from([p.default, 0.125, 1.0]))
        case "float | None":
            return draw(st.sampled_from([p.default, 16.0]))
        case "int":
            return draw(st.sampled_from([p.default, 0]))
        case "int | None" | "Sequence[int] | None":
            return p.default
    raise TypeError(f"{operator.__name__}: there is no strategy for {p}")


@st.composite
def calls(draw: st.DrawFn, operator: Operator) -> dict[str, Any]:
    """Arguments by name."""
    parameters, described, drawn = operator.__signature__.parameters, tensors_of(operator), shapes(draw)
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = {n: option(draw, operator, p) for n, p in parameters.items() if n not in described}
    made = {}
    for name in (n for n in parameters if n in described):
        if parameters[name].annotation == "Sequence[Tensor]":
            made[name] = []  # filled by `vary`
            continue
        if "None" in parameters[name].annotation and draw(st.booleans()):
            made[name] = None
            continue
        shape = drawn.shape(described[name].shapes)
        if described[name].is_of("indices"):
            t = torch.randint(drawn.size("V"), shape, generator=generator)
            if "ignore_index" in arguments:
                ignored = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
                t = t.masked_fill(ignored, arguments["ignore_index"])
            t = t.to(draw(st.sampled_from([torch.int64, torch.int32])))
        else:
            t = numbers(operator, name, described[name], shape, generator)
            t = t.to((torch.complex128 if dtype == torch.float64 else torch.complex64) if t.is_complex() else dtype)
        if t.dim():
            t = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](t, draw(st.integers(0, t.dim() - 1)))
        requires_grad = t.is_floating_point() and name not in operator.constants and draw(st.integers(0, 3)) > 0
        made[name] = t.requires_grad_(requires_grad)
    arguments |= made
    vary = getattr(own_test_file(operator), "vary", None)
    if vary is not None:
        vary(draw, arguments)
    return arguments


@cache
def own_test_file(operator: Operator) -> ModuleType:
    """The operator's own test file. A form for split classes has another one than the operator beside it."""
    split = "vocab_parallel_" if operator.__name__.startswith("vocab_parallel_") else ""
    stem = f"test_{split}{operator.__module__.rpartition('.')[2]}"
    (path,) = Path(__file__).parents[1].rglob(f"{stem}.py")
    spec = spec_from_file_location(stem, path)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_low_rank(draw: Callable, arguments: dict[str, Any], prefix: str = "") -> None:
    """For use in `vary`: a low-rank addend, whose tensors may be fp32, or none."""
    pair = [f"{prefix}low_rank_input", f"{prefix}low_rank_weight"]
    if any(arguments[name] is None for name in pair):
        arguments |= dict.fromkeys(pair)
    for name in pair:
        may_be_float32(draw, arguments, name)


def may_be_float32(draw: Callable, arguments: dict[str, Any], *names: str) -> None:
    """For use in `vary`: these arguments may be fp32 while the others have half precision."""
    present = [n for n in names if arguments[n] is not None]
    if present and arguments[present[0]].dtype in HALF_TYPES and draw(st.booleans()):
        for name in present:
            arguments[name] = like(arguments[name], torch.float32)
