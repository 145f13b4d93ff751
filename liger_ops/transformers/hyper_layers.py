"""Layers with hyper-connections, which add the output of a block to their streams:

    h = post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(      h = liger_hyper_post(y, s, post, comb) if
        comb.to(dtype).transpose(-1, -2), s                                     liger_takes(y, s, post, comb, dtype) else
    )                                                                           post.to(dtype) ...

The expression is evaluated on random tensors to find out what its names stand for, and where it rounds. It stays behind for
arguments that were not probed. See rewrite.py.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from ..projections import autocast_dtype
from . import hyper_connections, probe, rewrite
from .patched import (
    NotUnderstood,
    Switches,
    give_subclass,
    inner_function,
    is_distributed,
    original_class,
    require_switch,
)

OPERATOR = "hyper_post"
CALL, EXACT, TAKES = "liger_hyper_post", "liger_exact_hyper_post", "liger_takes"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# (batch, positions, streams, columns) of the probe, all different.
SHAPES = {"y": (2, 3, 6), "streams": (2, 3, 4, 6), "post": (2, 3, 4), "comb": (2, 3, 4, 4)}


def takes(y: Any, streams: Any, post: Any, comb: Any, dtype: Any) -> bool:
    """Whether arguments are like those of the probe."""
    given = [t for t in (y, streams, post, comb) if t is not None]
    if not all(isinstance(t, Tensor) and t.dtype in FLOATS and not is_distributed(t) for t in given):
        return False
    if streams.dim() < 2 or dtype not in (None, streams.dtype):
        return False
    rows, n = streams.shape[:-1], streams.shape[-1]
    if y.shape != (*rows[:-1], n) or post.shape != rows or post.dtype != torch.float32:
        return False
    # A narrower y is widened, as by the multiplication.
    if torch.promote_types(y.dtype, streams.dtype) != streams.dtype:
        return False
    # Autocast computes the product of comb and streams in half precision.
    return comb is None or (
        comb.shape == (*rows, rows[-1]) and comb.dtype == torch.float32 and autocast_dtype(streams) is None
    )


def hyper_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    return F.hyper_post(y.to(streams.dtype), streams, post, comb)


def exact_hyper_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor | None) -> Tensor:
    """Rounds its result only."""
    return F.hyper_post(y.to(streams.dtype), streams, post, comb, rounded=False)


HELPERS: dict[str, Callable] = {CALL: hyper_post, EXACT: exact_hyper_post, TAKES: takes}


# ---- What an expression computes


class Mixture(NamedTuple):
    names: dict[str, str]  # of y, streams, post and, if the expression has them, comb and dtype
    rounded: bool


# Evaluating them has no effect.
PURE = (
    ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.Constant, ast.UnaryOp, ast.Tuple, ast.keyword, ast.operator, ast.unaryop,
    ast.expr_context,
)  # fmt: skip


def is_pure(node: ast.AST) -> bool:
    return all(
        isinstance(below, PURE) and not (isinstance(below, ast.Attribute) and below.attr.endswith("_"))
        for below in ast.walk(node)
    )


def assignments_of(names: list[str]) -> Iterator[dict[str, str]]:
    """Every way in which the names may stand for tensors and a dtype."""
    for others in ((), ("comb",), ("dtype",), ("comb", "dtype")):
        roles = ("y", "streams", "post", *others)
        if len(roles) == len(names):
            yield from (dict(zip(roles, order)) for order in itertools.permutations(names))


def inputs_of(roles: dict[str, str], dtype: torch.dtype) -> dict[str, Any]:
    given: dict[str, Any] = {
        role: probe.random_tensor(*shape, seed=i) for i, (role, shape) in enumerate(SHAPES.items())
    }
    given |= {role: given[role].to(dtype) for role in ("y", "streams")}
    return {role: given.get(role, dtype) for role in roles}


def mixture_of(node: ast.expr, function: Any) -> Mixture | None:
    """What the expression computes of local names of the function, or None."""
    code, scope = function.__code__, function.__globals__
    names = sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & {*code.co_varnames})
    if not is_pure(node) or "unsqueeze" not in {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}:
        return None
    text = ast.unparse(node)

    def theirs(roles: dict[str, str], given: dict[str, Any]) -> Any:
        try:
            return eval(text, dict(scope), {roles[role]: value for role, value in given.items()})
        except Exception:
            return None

    def ours(given: dict[str, Any], rounded: bool = True) -> Tensor:
        return F.hyper_post(*(given.get(role) for role in SHAPES), rounded=rounded)  # type: ignore[arg-type]

    for roles in assignments_of(names):
        given = inputs_of(roles, torch.float32)
        tensors = [t.requires_grad_() for t in given.values() if isinstance(t, Tensor)]
        with torch.enable_grad():
            found, expected = theirs(roles, given), ours(given)
        if not isinstance(found, Tensor) or found.dtype != torch.float32 or not found.requires_grad:
            continue
        if not probe.agrees(expected.detach(), found.detach()):
            continue
        dout = probe.random_tensor(*SHAPES["streams"], seed=9)
        gradients = [torch.autograd.grad(out, tensors, dout, allow_unused=True) for out in (expected, found)]
        given = inputs_of(roles, torch.bfloat16)
        found = theirs(roles, given)
        if not all(map(probe.agrees, *gradients)) or not isinstance(found, Tensor) or found.dtype != torch.bfloat16:
            continue

        def distance(rounded: bool) -> float:
            return float((ours(given, rounded).float() - found.float()).abs().sum())

        return Mixture(roles, min((True, False), key=distance))
    return None


# ---- Statements


def fuse_mixtures(original: Any, block: list[ast.stmt], _: frozenset[str], function: ast.FunctionDef) -> bool:
    """Replaces expressions whose value is assigned or returned."""
    for statement in block:
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.Return)) or not isinstance(value, (ast.BinOp, ast.Call)):
            continue
        found = mixture_of(value, original)
        if found is not None:
            y, streams, post, comb, dtype = (found.names.get(role) for role in (*SHAPES, "dtype"))
            call = f"{CALL if found.rounded else EXACT}({y}, {streams}, {post}, {comb})"
            condition = f"{TAKES}({y}, {streams}, {post}, {comb}, {dtype})"
            merged = ast.IfExp(rewrite.expression(condition), rewrite.expression(call), value)
            statement.value = ast.copy_location(merged, value)
            return True
    return False


@functools.lru_cache(None)
def with_mixtures(function: Any) -> Any:
    """The function's code with operators for these expressions, or None if it has none."""
    if not hasattr(function, "__code__") or "unsqueeze" not in rewrite.names_in(function.__code__):
        return None
    found = rewrite.rewritten(function, (functools.partial(fuse_mixtures, function), frozenset()))
    return found.code if found else None


# ---- Layers


def has_connections(module: nn.Module) -> bool:
    """Whether the module adds to streams: its connections return more than the block's input, which heads return alone."""
    if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return False
    connections = (m for m in module.children() if hyper_connections.looks_like_connection(m))
    return any(getattr(m, f"{hyper_connections.prefix_of(m)}scale").numel() > 1 for m in connections)


def identify(module: nn.Module, switches: Switches) -> None:
    require_switch(switches, OPERATOR)
    if with_mixtures(inner_function(original_class(type(module)).forward)) is None:
        raise NotUnderstood(f"adds to its streams by no expression that computes {OPERATOR}")


def patch(module: nn.Module, _: None) -> str:
    def members(cls: type[nn.Module]) -> dict[str, Any]:
        code = with_mixtures(inner_function(cls.forward))
        return {"forward": rewrite.rebound(cls.forward, HELPERS, code)}

    give_subclass(module, "layer", OPERATOR, rewrite.rebinding_key(type(module).forward), members)
    return OPERATOR
