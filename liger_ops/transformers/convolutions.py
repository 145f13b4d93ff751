"""Depthwise causal convolutions over time, which linear attention and state space layers begin with, and packed samples.

A module calls the function ``causal_conv1d_fn(x, weight, bias, activation)`` of its file, with x: (B, C, S). The patched
module calls one that runs `causal_conv1d` on the transposed view, and returns a transposed view. Where one operator computes
the statements around the call too, it runs instead: split_convolutions.py, short_convolutions.py.

The gates of a delta rule in such a module run in `delta_gates`: delta_rule.py.

The model around these modules derives `seq_idx` from positions that restart, once a forward, and its layers pass it on.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from . import delta_rule, probe, rewrite
from . import short_convolutions as shorts
from . import split_convolutions as splits
from .patched import (
    NotUnderstood,
    Switches,
    give_subclass,
    inner_function,
    is_distributed,
    original_class,
    require_switch,
)
from .recurrences import BORDERS, recurrence_of, separated, warn

OPERATOR = "causal_conv1d"
ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}
WIDTHS = range(2, 9)
# Arguments of the function of the package causal_conv1d. The operator does not return states.
STATES = ("initial_states", "return_final_states", "final_states_out")
# The keyword that says that the model derived `seq_idx`: its samples as `cu_seqlens`, or None if nothing takes it.
DERIVED = "liger_cu_seqlens"


# ---- Functions that transformers takes from a package, if it is installed


class Packaged(NamedTuple):
    package: str
    installed: bool
    parameters: tuple[str, ...]  # of the function that runs


def packaged(function: Any) -> Packaged | None:
    """What transformers' decorator knows about the function, or None."""
    while function is not None:
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if {"package", "is_new_implementation", "applicable_params"} <= set(names):
            held = {name: cell.cell_contents for name, cell in zip(names, function.__closure__)}
            return Packaged(held["package"], held["is_new_implementation"], tuple(held["applicable_params"]))
        function = getattr(function, "__wrapped__", None)
    return None


def arguments_of(function: Any) -> tuple[tuple[str, ...], bool]:
    """Names of the arguments that may be given by position, and whether the function takes any keyword."""
    parameters = inspect.signature(inner_function(function)).parameters.values()
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    return positional, any(p.kind is p.VAR_KEYWORD for p in parameters)


# ---- What a module computes


def is_convolution(name: str, value: Any) -> bool:
    if "conv1d" not in name or not callable(value) or not inspect.isfunction(inner_function(value)):
        return False
    names, _ = arguments_of(value)
    return names[1:3] == ("weight", "bias") and "activation" in names


def is_packaged(name: str, value: Any) -> bool:
    return callable(value) and inspect.isfunction(inner_function(value)) and packaged(value) is not None


@functools.lru_cache(None)
def why_not(function: Any) -> str:
    """Why the operator does not compute what the function computes; empty if it does."""
    inner = inner_function(function)
    # One row of large values, which a function that clamps would change.
    x = probe.random_tensor(2, 5, 9) * torch.tensor([1.0, 1.0, 30.0, 1.0, 1.0], device="cpu")[:, None]
    weight, bias = probe.random_tensor(5, 4, seed=1), probe.random_tensor(5, seed=2)
    for given in (None, bias):
        for activation in (None, "silu"):
            theirs = probe.try_call(inner, x, weight, given, activation=activation)
            rows, wide = x.mT.double(), None if given is None else given.double()
            exact = F.causal_conv1d(rows, weight.double(), wide, ACTIVATIONS[activation]).mT
            if theirs is None or not probe.agrees(exact, theirs[0]):
                return f"{inner.__name__} computes something else"
    half = probe.try_call(inner, x.bfloat16(), weight, bias, activation="silu")
    if half is not None and half[0].dtype != torch.bfloat16:
        return f"the result of {inner.__name__} in half precision is wider"
    return ""


class Convolution(NamedTuple):
    methods: dict[str, dict[str, Any]]  # the functions that methods call, by their names
    reason: str  # when something else runs
    gates: tuple[str, ...] = ()  # methods that compute the gates of a delta rule
    layouts: tuple[splits.Layout, ...] = ()  # of projections whose columns alternate


def convolving_methods(cls: type) -> dict[str, dict[str, Any]]:
    return probe.methods_with(cls, is_convolution)


def recurrences_of(cls: type) -> dict[str, dict[str, Any]]:
    """The functions of packages that methods with convolutions call besides."""
    found = probe.methods_with(cls, lambda n, f: is_packaged(n, f) and not is_convolution(n, f))
    return {method: used for method, used in found.items() if method in convolving_methods(cls)}


def looks_convolving(module: nn.Module) -> bool:
    return bool(convolving_methods(original_class(type(module))))


def identify(module: nn.Module, switches: Switches) -> Convolution:
    """With gates, but without methods if only the gates are understood."""
    cls = original_class(type(module))
    methods = convolving_methods(cls) if switches[delta_rule.OPERATOR] else {}
    gates = tuple(method for method in methods if delta_rule.with_gates(getattr(cls, method)))
    try:
        found = identify_convolution(module, switches)
    except NotUnderstood as reason:
        if not gates:
            raise
        found = Convolution({}, f"no causal_conv1d: {reason}")
    return found._replace(gates=gates)


def identify_convolution(module: nn.Module, switches: Switches) -> Convolution:
    require_switch(switches, OPERATOR)
    cls = original_class(type(module))
    methods = convolving_methods(cls)
    reasons = [why_not(f) for used in methods.values() for f in used.values()]
    if any(reasons):
        raise NotUnderstood(next(filter(None, reasons)))
    # A function that takes the convolution's weight and those of other modules calls none of them.
    fused = [
        f"in training, {found.package}'s {name} computes {', '.join(weights)}"
        for used in recurrences_of(cls).values()
        for name, f in used.items()
        if (found := packaged(f)) and found.installed
        if "conv1d" in (weights := [n.removesuffix("_weight") for n in found.parameters if n.endswith("_weight")])
    ]
    layouts = [layout for method in methods for layout in splits.layouts_of(module, getattr(cls, method))]
    return Convolution(methods, "; ".join(dict.fromkeys(fused)), layouts=tuple(layouts))


# ---- The functions that patched modules call


def numbers_for(x: Tensor, seq_idx: Tensor | None) -> Tensor | None:
    """seq_idx for the rows of x: (B, C, S). Rows before those of seq_idx, of a cache, belong to the first sample."""
    before = 0 if seq_idx is None else x.shape[2] - seq_idx.shape[1]
    return seq_idx if seq_idx is None or before <= 0 else torch.cat([seq_idx[:, :1].expand(-1, before), seq_idx], 1)


def stated(value: Any) -> bool:
    return value is not None and value is not False


def understood(x: Any, weight: Any, bias: Any, given: dict[str, Any]) -> bool:
    """Whether the operator takes the arguments of a call."""
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or x.dim() != 3 or weight.dim() != 2:
        return False
    if given.get("activation") not in ACTIVATIONS or any(stated(given.get(name)) for name in STATES):
        return False
    if given.get("cu_seqlens") is not None or weight.shape[1] not in WIDTHS or weight.shape[0] != x.shape[1]:
        return False
    return bias is None or bias.dtype == weight.dtype


def arguments_if_understood(original: Any, args: Any, named: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name, if the operator takes them."""
    names, takes_any = arguments_of(original)
    given = dict(zip(names, args)) | named
    x, weight, bias = given.get(names[0]), given.get("weight"), given.get("bias")
    plain = len(given) == len(args) + len(named) and (takes_any or given.keys() <= set(names))
    if not plain or not understood(x, weight, bias, given) or any(map(is_distributed, (x, weight, bias))):
        return None
    return given


@functools.lru_cache(None)
def convolution_function(original: Any) -> Callable:
    """A function with the original's signature. Calls with arguments that the operator does not take go to the original."""
    names, _ = arguments_of(original)

    def convolved(*args: Any, **named: Any) -> Any:
        given = arguments_if_understood(original, args, named)
        if given is None:
            if DERIVED in named:
                named = {name: value for name, value in named.items() if name not in (DERIVED, BORDERS, "seq_idx")}
            return original(*args, **named)
        x, weight, bias = given[names[0]], given["weight"], given.get("bias")
        rows = x.transpose(1, 2)
        if x.dtype != weight.dtype and (x.dtype == torch.float64 or weight.dtype != torch.float32):
            rows = rows.to(weight.dtype)
        activation, seq_idx = ACTIVATIONS[given.get("activation")], numbers_for(x, given.get("seq_idx"))
        y = F.causal_conv1d(rows, weight, bias, activation, seq_idx=seq_idx)
        return y.to(x.dtype).transpose(1, 2)

    return convolved


def arguments_of_columns(
    original: Any, x: Tensor, channels: int, args: Any, named: dict[str, Any]
) -> tuple[Tensor, Tensor | None, str, Tensor | None] | None:
    """(weight, bias, activation, seq_idx) of a call on `channels` columns of x: (B, S, columns), if an operator takes them
    without a conversion."""
    few = x[..., :channels].transpose(1, 2) if x.dim() == 3 else x
    given = arguments_if_understood(original, (few, *args), named)
    if given is None:
        return None
    weight = given["weight"]
    if weight.dtype not in (x.dtype, torch.float32) or x.dtype == torch.float64 != weight.dtype:
        return None
    return weight, given.get("bias"), ACTIVATIONS[given.get("activation")], numbers_for(few, given.get("seq_idx"))


@functools.lru_cache(None)
def short_function(original: Any) -> Callable:
    """The gated convolution for the arguments of the original, with x: (B, S, columns of B, C and x), or None if the operator
    does not take them."""

    def short(x: Tensor, *args: Any, **named: Any) -> Tensor | None:
        given = arguments_of_columns(original, x, x.shape[-1] // 3, args, named)
        if given is None or x.shape[2] % 3:
            return None
        weight, bias, activation, seq_idx = given
        return F.short_conv(x, weight, bias, seq_idx=seq_idx) if activation == "none" else None

    return short


@functools.lru_cache(None)
def split_function(original: Any) -> Callable:
    """q, k, v and z for the arguments of the original, with x: (B, S, columns), or None if the operator does not take them."""

    def split(sizes: Any, x: Tensor, *args: Any, groups: int = 1, **named: Any) -> Any:
        given = arguments_of_columns(original, x, groups * sum(sizes[:3]), args, named)
        if given is None or x.shape[2] != groups * sum(sizes):
            return None
        weight, bias, activation, seq_idx = given
        return F.causal_conv1d_split(x, weight, bias, activation, sizes=sizes, groups=groups, seq_idx=seq_idx)

    return split


@functools.lru_cache(None)
def split_parts_function(original: Any) -> Callable:
    split = split_function(original)

    def split_parts(sizes: Any, x: Any, *args: Any, **named: Any) -> Any:
        parts = split([*sizes], x, *args, **named) if isinstance(x, Tensor) else None
        return None if parts is None else parts[:3]

    return split_parts


@functools.lru_cache(None)
def recurrence_function(original: Any) -> Callable:
    """The function, which gets derived samples as far as it takes them."""
    found = packaged(original)
    parameters = found.parameters if found is not None else ()
    alone = found is not None and not found.installed and recurrence_of(original) is not None

    def recurrence(*args: Any, **named: Any) -> Any:
        derived, ends, borders = DERIVED in named, named.pop(DERIVED, None), named.pop(BORDERS, None)
        if derived and alone:
            compiling = torch.compiler.is_compiling()
            if compiling or (borders is not None and borders.packed):
                y = None if compiling else separated(original, borders, args, named)
                if y is not None:
                    return y
                warn(original.__name__, found.package, not compiling)  # type: ignore[union-attr]
        if derived and "seq_idx" not in parameters:
            named.pop("seq_idx", None)
        if "cu_seqlens" in parameters and named.get("cu_seqlens") is None:
            ends = named.get("cu_seq_lens_q", ends)
            if ends is not None:
                named["cu_seqlens"] = ends
        return original(*args, **named)

    return recurrence


def changes_of(function: Any, found: Convolution, method: str) -> dict[str, Any]:
    """Operators that replace more than the convolution, and the changes of the method that call them."""
    functions, methods = frozenset(found.methods.get(method, {})), frozenset(layout.method for layout in found.layouts)
    changes = {
        splits.OPERATOR: splits.with_split(function, functions, methods),
        shorts.OPERATOR: shorts.with_short(function, functions),
    }
    return {
        operator: change
        for operator, change in changes.items()
        if change and functions and rewrite.rewritten(inner_function(function), change)
    }


def patch(module: nn.Module, found: Convolution) -> str:
    recurrences = recurrences_of(type(module)) if found.methods else {}
    names = dict.fromkeys((*found.methods, *found.gates))
    changes = {method: changes_of(getattr(type(module), method), found, method) for method in names}

    def members(cls: type) -> dict[str, Any]:
        bound: dict[str, Any] = {"liger_reason": found.reason}
        for method in names:
            function = getattr(cls, method)
            replaced = {name: convolution_function(f) for name, f in found.methods.get(method, {}).items()}
            replaced |= {name: recurrence_function(f) for name, f in recurrences.get(method, {}).items()}
            wanted = (*changes[method].values(),)
            for name, f in found.methods[method].items() if wanted else ():
                if shorts.OPERATOR in changes[method]:
                    replaced[shorts.SHORT + name] = short_function(f)
                if splits.OPERATOR in changes[method]:
                    replaced[splits.SPLIT + name] = split_parts_function(f)
                    replaced[splits.SPLIT_ROWS + name] = splits.split_rows_function(split_function(f), found.layouts)
            if method in found.gates:
                wanted, replaced = (*wanted, delta_rule.change_of(function)), replaced | delta_rule.HELPERS
            code = rewrite.rewritten(inner_function(function), *wanted).code if wanted else None  # type: ignore[union-attr]
            bound[method] = rewrite.rebound(function, replaced, code)
        return bound

    functions = [getattr(type(module), method) for method in names]
    fused = [*dict.fromkeys(operator for each in changes.values() for operator in each)] or [OPERATOR]
    operators = fused * bool(found.methods) + [delta_rule.OPERATOR] * bool(found.gates)
    replacement, key = (
        " and ".join(operators),
        (found.reason, found.gates, found.layouts, *map(rewrite.rebinding_key, functions)),
    )
    give_subclass(module, "conv", replacement, key, members)
    return replacement
