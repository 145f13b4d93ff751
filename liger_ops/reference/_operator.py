"""Turns a declaration into the operator's schema and a function that calls the operator."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.jit import _builtins

P = ParamSpec("P")
R = TypeVar("R")

SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "int",
    int | None: "int?",
    float: "float",
    float | None: "float?",
    str: "str",
    Sequence[int] | None: "int[]?",
}


class Operator(Protocol[P, R]):
    """torch.ops.liger.<name> as a typed function."""

    __name__: str
    __signature__: inspect.Signature
    reference: Callable[P, R]
    schema: str
    result: type  # Tensor, a tuple or a NamedTuple
    rows: int
    forward_out_dims: tuple[int, ...]
    constants: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


_declared: dict[str, Operator] = {}


def operator(
    *,
    rows: int = 0,
    forward_out_dims: tuple[int, ...] = (),
    constants: tuple[str, ...] = (),
    choices: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Declares an operator by its formula.

    rows: number of leading arguments that are row-wise tensors; vmap may add a leading dimension to them.
    forward_out_dims: position of that dimension in each result of `_<name>_fwd`, if the operator has this private op.
    constants: tensors that must not require a gradient. choices: allowed values of each string argument.
    """

    def declare(formula: Callable[P, R]) -> Operator[P, R]:
        name = formula.__name__
        hints = typing.get_type_hints(formula)
        result = hints.pop("return")
        signature = inspect.signature(formula)

        @functools.wraps(formula)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            try:
                return getattr(torch.ops.liger, name)(*args, **kwargs)
            except (RuntimeError, TypeError):
                demand_types(name, signature, hints, args, kwargs)
                raise

        @functools.wraps(formula)
        def call_with_named_results(*args: P.args, **kwargs: P.kwargs) -> Any:
            return result(*call(*args, **kwargs))

        function = cast(Operator[P, R], call_with_named_results if hasattr(result, "_fields") else call)
        # TorchScript does not support *args: it calls the operator instead of compiling this function's source.
        _builtins._register_builtin(function, f"liger::{name}")
        function.reference, function.__signature__ = formula, signature
        function.schema = schema_of(signature, hints, name, result)
        function.result, function.rows, function.forward_out_dims = result, rows, forward_out_dims
        function.constants, function.choices = constants, choices or {}
        _declared[name] = function
        return function

    return declare


@functools.cache
def operators() -> dict[str, Operator]:
    """All operators that the files of this folder declare, by name."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        import_module(f"{__package__}.{path.stem}")
    return dict(sorted(_declared.items()))


def public_names() -> dict[str, Any]:
    """The operators, and the named tuples that some of them return."""
    found = operators()
    return {**found, **{o.result.__name__: o.result for o in found.values() if hasattr(o.result, "_fields")}}


def result_count(result: Any) -> int:
    return 1 if result is Tensor else len(getattr(result, "_fields", None) or typing.get_args(result))


def schema_of(signature: inspect.Signature, hints: dict[str, Any], name: str, result: Any) -> str:
    """An operator whose name ends in an underscore writes to its first argument."""
    arguments: list[str] = []
    for i, p in enumerate(signature.parameters.values()):
        if p.kind is p.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        kind = "Tensor(a!)" if i == 0 and name.endswith("_") else SCHEMA_TYPES[hints[p.name]]
        written = json.dumps(p.default) if isinstance(p.default, str) else repr(p.default)
        default = "" if p.default is p.empty else f"={written}"
        arguments.append(f"{kind} {p.name}{default}")
    count = result_count(result)
    results = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"{name}({', '.join(arguments)}) -> {results}"


def demand(condition: bool, op: str, argument: str, rule: str, got: object) -> None:
    if not condition:
        raise RuntimeError(f"{op}: {argument} must {rule} (got {got})")


# The values that the dispatcher takes for a type, and their name.
TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    Tensor: ((Tensor,), "a Tensor"),
    bool: ((bool, torch.SymBool), "a bool"),
    int: ((int, torch.SymInt, Tensor), "an int"),
    float: ((int, float, torch.SymInt, torch.SymFloat, Tensor), "a float"),
    str: ((str,), "a str"),
    Sequence[int]: ((Sequence,), "a sequence of ints"),
    type(None): ((type(None),), "None"),
}


def demand_types(
    op: str, signature: inspect.Signature, hints: dict[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Called after the operator has failed: the dispatcher's own message is about its schema."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{op}: {error}") from None
    for argument, value in given.items():
        kinds = [TYPES[kind] for kind in typing.get_args(hints[argument]) or (hints[argument],)]
        if hasattr(value, "__torch_function__") or any(isinstance(value, types) for types, _ in kinds):
            continue
        got = repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise TypeError(f"{op}: {argument} must be {' or '.join(name for _, name in kinds)} (got {got})") from None


def demand_choice(op: str, argument: str, allowed: tuple[str, ...], got: str) -> None:
    *first, last = (f"'{value}'" for value in allowed)
    demand(got in allowed, op, argument, f"be {', '.join(first)} or {last}", f"'{got}'")


def hint_if_swapped(input_name: str, input: Tensor, weight_name: str, weight: Tensor, like: Tensor) -> str:
    """Ends messages about the shapes of input (..., n), weight (V, n) and `like`, whose dimensions begin with (...)."""
    rows = weight.shape[:-1]
    fits = input.dim() == 2 and weight.dim() > 0 and weight.shape[-1] == input.shape[-1]
    if fits and like.dim() - len(rows) in (0, 1) and like.shape[: len(rows)] == rows:
        return f"; {input_name} and {weight_name} may be swapped"
    return ""


def widened(x: Tensor) -> Tensor:
    """x in the dtype of its sums and statistics: fp32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
