"""Turns a declaration into the operator's schema and a function that calls the operator."""

from __future__ import annotations

import functools
import inspect
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.jit import _builtins

P = ParamSpec("P")
R = TypeVar("R")

_REQUIRED: dict[Any, str] = {
    Tensor: "Tensor",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    Sequence[Tensor]: "Tensor[]",
    Sequence[int]: "int[]",
    Sequence[float]: "float[]",
}
SCHEMA_TYPES: dict[Any, str] = _REQUIRED | {kind | None: f"{text}?" for kind, text in _REQUIRED.items()}


class Operator(Protocol[P, R]):
    """torch.ops.liger.<name> as a typed function."""

    __name__: str
    __signature__: inspect.Signature
    reference: Callable[P, R]
    schema: str
    types: Mapping[str, Any]  # of the arguments
    result: type  # Tensor, a tuple or a NamedTuple
    is_derived: bool  # the signature follows from that of another operator
    base: Operator | None  # this other operator
    alias_of: Operator | None
    rows: int
    forward_out_dims: tuple[int, ...]
    constants: tuple[str, ...]
    choices: Mapping[str, tuple[str, ...]]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __hash__(self) -> int: ...


_declared: dict[str, Operator] = {}


def operator(
    *,
    rows: int = 0,
    forward_out_dims: tuple[int, ...] = (),
    constants: tuple[str, ...] = (),
    choices: Mapping[str, tuple[str, ...]] | None = None,
    views: Mapping[int, str] | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Declares an operator by its formula.

    rows: number of leading arguments that are row-wise tensors; vmap may add a leading dimension to them.
    forward_out_dims: position of that dimension in each result of `_<name>_fwd`, if the operator has this private op.
    constants: tensors that must not require a gradient. choices: allowed values of each string argument. views: position
    of a result -> the argument that it is a view of.
    """

    def declare(formula: Callable[P, R]) -> Operator[P, R]:
        function = _declare(
            formula, inspect.signature(formula), typing.get_type_hints(formula), constants, choices or {}, views or {}
        )
        function.reference, function.is_derived = formula, False
        function.base, function.rows, function.forward_out_dims = None, rows, forward_out_dims
        return function

    return declare


def form_of(base: Operator[P, Any], without: tuple[str, ...] = ()) -> Callable[[Callable[..., R]], Operator[P, R]]:
    """Declares an operator with the arguments of `base`, from a formula that takes them, and `op`, by name.

    without: arguments that it does not have.
    """

    def declare(formula: Callable[..., R]) -> Operator[P, R]:
        kept = [p for name, p in base.__signature__.parameters.items() if name not in without]
        types = {name: kind for name, kind in base.types.items() if name not in without}
        return derived(base, base.__signature__.replace(parameters=kept), types, formula)

    return declare


def derived(base: Operator, signature: inspect.Signature, types: Mapping[str, Any], formula: Callable) -> Any:
    """Declares an operator with this signature and the properties of `base`."""
    name = formula.__name__
    defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}

    @functools.wraps(formula)
    def reference(*args: Any, **kwargs: Any) -> Any:
        return formula(op=name, **defaults | dict(zip(signature.parameters, args)) | kwargs)

    result = typing.get_type_hints(formula)["return"]
    signature = signature.replace(return_annotation=inspect.signature(formula).return_annotation)
    function = _declare(formula, signature, {**types, "return": result}, base.constants, base.choices)
    function.reference, function.is_derived, function.rows, function.forward_out_dims = reference, True, 0, ()
    function.base = base
    return function


def _declare(
    formula: Callable[P, R],
    signature: inspect.Signature,
    hints: dict[str, Any],
    constants: tuple[str, ...],
    choices: Mapping[str, tuple[str, ...]],
    views: Mapping[int, str] = MappingProxyType({}),
) -> Operator[P, R]:
    """Makes the function that has the name and the documentation of `formula`."""
    name, result = formula.__name__, hints["return"]
    types = {argument: kind for argument, kind in hints.items() if argument != "return"}

    @functools.wraps(formula)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return getattr(torch.ops.liger, name)(*args, **kwargs)
        except (RuntimeError, TypeError):
            demand_types(name, signature, types, args, kwargs)
            raise

    @functools.wraps(formula)
    def call_with_named_results(*args: P.args, **kwargs: P.kwargs) -> Any:
        return result(*call(*args, **kwargs))

    function = cast(Operator[P, R], call_with_named_results if hasattr(result, "_fields") else call)
    # TorchScript does not support *args: it calls the operator instead of compiling this function's source.
    _builtins._register_builtin(function, f"liger::{name}")
    function.__signature__, function.__annotations__ = signature, hints
    function.schema, function.types, function.result = schema_of(signature, types, name, result, views), types, result
    function.constants, function.choices, function.alias_of = constants, choices, None
    _declared[name] = function
    return function


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


def written(default: Any) -> str:
    if isinstance(default, str):
        return json.dumps(default)
    text = repr(list(default)) if isinstance(default, Sequence) else repr(default)
    return text.replace("e-0", "e-")  # as C++ authors write 1e-6


def schema_of(
    signature: inspect.Signature, types: dict[str, Any], name: str, result: Any, views: Mapping[int, str]
) -> str:
    """An operator whose name ends in an underscore writes to its first argument."""
    arguments: list[str] = []
    for i, p in enumerate(signature.parameters.values()):
        if p.kind is p.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        kind = SCHEMA_TYPES[types[p.name]]
        if i == 0 and name.endswith("_"):
            kind = "Tensor(a!)"
        elif p.name in views.values():
            kind = "Tensor(a)"
        default = "" if p.default is p.empty else f"={written(p.default)}"
        arguments.append(f"{kind} {p.name}{default}")
    count = result_count(result)
    returns = ["Tensor(a)" if i in views else "Tensor" for i in range(count)]
    results = returns[0] if count == 1 else f"({', '.join(returns)})"
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
    type(None): ((type(None),), "None"),
}


def is_a(value: Any, kind: Any) -> bool:
    if elements := typing.get_args(kind):
        return isinstance(value, Sequence) and all(is_a(element, *elements) for element in value)
    return hasattr(value, "__torch_function__") or isinstance(value, TYPES[kind][0])


def name_of(kind: Any) -> str:
    elements = typing.get_args(kind)
    return f"a sequence of {TYPES[elements[0]][1].split()[1]}s" if elements else TYPES[kind][1]


def text_of(value: Any, kinds: Sequence[Any]) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    text = type(value).__name__
    if isinstance(value, Sequence) and any(map(typing.get_args, kinds)):
        text += f" of {' and '.join(sorted({type(element).__name__ for element in value}))}"
    return text


def demand_types(
    op: str, signature: inspect.Signature, types: dict[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Called after the operator has failed: the dispatcher's own message is about its schema."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{op}: {error}") from None
    for argument, value in given.items():
        kind = types[argument]
        kinds = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
        if hasattr(value, "__torch_function__") or any(is_a(value, kind) for kind in kinds):
            continue
        rule = " or ".join(map(name_of, kinds))
        raise TypeError(f"{op}: {argument} must be {rule} (got {text_of(value, kinds)})") from None


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


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits as they enter the softmax."""
    x = widened(logits)
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def demand_positive(op: str, argument: str, got: float | None) -> None:
    demand(got is None or 0 < got < math.inf, op, argument, "be positive and finite", got)
