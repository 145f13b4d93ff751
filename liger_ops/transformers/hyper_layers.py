"""Layers with hyper-connections, which add the output of a block to their streams:

    h = post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(      h = liger_hyper_post(y, s, post, comb) if
        comb.to(dtype).transpose(-1, -2), s                                     liger_takes(y, s, post, comb, dtype) else
    )                                                                           post.to(dtype) ...

Or, for streams beside each other, in two statements:

    t = y.unsqueeze(-2) * post.unsqueeze(-1)
    h = s + t.flatten(-2)

The expression is evaluated on random tensors to find out what its names stand for, and where it rounds. It stays behind for
arguments that were not probed. See rewrite.py.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from ..linear.layers import autocast_dtype
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
CALL, TAKES = "liger_hyper_post", "liger_takes"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# (batch, positions, streams, columns) of the probe, all different.
SHAPES = {"y": (2, 3, 6), "streams": (2, 3, 4, 6), "post": (2, 3, 4), "comb": (2, 3, 4, 4)}


def takes(
    y: Any, streams: Any, post: Any, comb: Any, dtype: Any = None, flat: bool = False, narrow: bool = False
) -> bool:
    """Whether arguments are like those of the probe. flat: streams are (..., N n). narrow: post and comb have the dtype of
    streams, and otherwise are fp32."""
    given = [t for t in (y, streams, post, comb) if t is not None]
    if not all(isinstance(t, Tensor) and t.dtype in FLOATS and not is_distributed(t) for t in given):
        return False
    rows = post.shape
    if not rows or y.dim() != len(rows) or y.shape[:-1] != rows[:-1] or dtype not in (None, streams.dtype):
        return False
    n = y.shape[-1]
    if streams.shape != ((*rows[:-1], rows[-1] * n) if flat else (*rows, n)):
        return False
    numbers = streams.dtype if narrow else torch.float32
    if post.dtype != numbers or (comb is not None and (comb.dtype != numbers or comb.shape != (*rows, rows[-1]))):
        return False
    # A narrower y is widened, as by the multiplication.
    if torch.promote_types(y.dtype, streams.dtype) != streams.dtype:
        return False
    # Autocast computes the product of comb and streams in half precision.
    return comb is None or autocast_dtype(streams) is None


def hyper_post(y: Tensor, streams: Tensor, post: Tensor, comb: Any, rounded: bool = True, flat: bool = False) -> Tensor:
    y = y.to(streams.dtype)
    if not flat:
        return F.hyper_post(y, streams, post, comb, rounded=rounded)
    return F.hyper_post(y, streams.unflatten(-1, (post.shape[-1], y.shape[-1])), post, comb, rounded=rounded).flatten(
        -2
    )


HELPERS: dict[str, Callable] = {CALL: hyper_post, TAKES: takes}


# ---- What an expression computes


class Mixture(NamedTuple):
    names: dict[str, str]  # of y, streams, post and, if the expression has them, comb and dtype
    rounded: bool
    flat: bool
    narrow: bool


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


def inputs_of(roles: dict[str, str], dtype: torch.dtype, flat: bool, narrow: bool) -> dict[str, Any]:
    given: dict[str, Any] = {
        role: probe.random_tensor(*shape, seed=i) for i, (role, shape) in enumerate(SHAPES.items())
    }
    given = {role: t.to(dtype) if narrow or role in ("y", "streams") else t for role, t in given.items()}
    if flat:
        given["streams"] = given["streams"].flatten(-2)
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
        except Exception:  # in most orders the names do not fit the expression
            return None

    for roles, flat in itertools.product(assignments_of(names), (False, True)):

        def ours(given: dict[str, Any], rounded: bool = True, flat: bool = flat) -> Tensor:
            y, streams, post, comb = (given.get(role) for role in SHAPES)
            return hyper_post(y, streams, post, comb, rounded, flat)  # type: ignore[arg-type]

        given = inputs_of(roles, torch.float32, flat, False)
        tensors = [t.requires_grad_() for t in given.values() if isinstance(t, Tensor)]
        with torch.enable_grad():
            found, expected = theirs(roles, given), ours(given)
        if not isinstance(found, Tensor) or found.dtype != torch.float32 or not found.requires_grad:
            continue
        if not probe.agrees(expected.detach(), found.detach()):
            continue
        dout = probe.random_tensor(*expected.shape, seed=9)
        gradients = [torch.autograd.grad(out, tensors, dout, allow_unused=True) for out in (expected, found)]
        if not all(map(probe.agrees, *gradients)):
            continue
        for narrow in (False, True):
            given = inputs_of(roles, torch.bfloat16, flat, narrow)
            half = theirs(roles, given)
            if isinstance(half, Tensor) and half.dtype == torch.bfloat16:
                distances = [float((ours(given, r).float() - half.float()).abs().sum()) for r in (True, False)]
                return Mixture(roles, distances[0] <= distances[1], flat, narrow)
    return None


# ---- Statements


class Inline(ast.NodeTransformer):
    """Replaces a name by what was assigned to it."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self.name, self.value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.value if node.id == self.name else node


def is_dead(name: str, statements: list[ast.stmt], function: ast.FunctionDef) -> bool:
    """Whether nothing reads the value that the name has before these statements."""
    if any(isinstance(n, rewrite.LATER) and n is not function for n in ast.walk(function)):
        return False
    for statement in statements:
        mentions = [n for n in ast.walk(statement) if rewrite.is_name(n, name)]
        if mentions:
            return len(mentions) == 1 and (rewrite.simple_assignment(statement) or ("",))[0] == name
    return True


def value_with(block: list[ast.stmt], i: int, function: ast.FunctionDef) -> ast.expr | None:
    """The value of block[i] with that of block[i - 1] in its place, if nothing else reads the latter."""
    name, part = rewrite.simple_assignment(block[i - 1]) or ("", None) if i else ("", None)
    value = getattr(block[i], "value", None)
    # In a loop, the name may be read in the next turn.
    if part is None or not isinstance(value, ast.expr) or block is not function.body or not is_pure(part):
        return None
    reads = [n for n in ast.walk(value) if rewrite.is_name(n, name)]
    rebinds = (rewrite.simple_assignment(block[i]) or ("",))[0] == name
    if len(reads) != 1 or not (rebinds or is_dead(name, block[i + 1 :], function)):
        return None
    return Inline(name, part).visit(copy.deepcopy(value))


def fuse_mixtures(original: Any, block: list[ast.stmt], _: frozenset[str], function: ast.FunctionDef) -> bool:
    """Replaces expressions whose value is assigned or returned."""
    for i, statement in enumerate(block):
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.Return)) or not isinstance(value, (ast.BinOp, ast.Call)):
            continue
        found = mixture_of(value, original)
        whole = value_with(block, i, function) if found is None else None
        if whole is not None:
            value, found = whole, mixture_of(whole, original)
        if found is not None:
            y, streams, post, comb, dtype = (found.names.get(role) for role in (*SHAPES, "dtype"))
            given = f"{y}, {streams}, {post}, {comb}"
            condition = f"{TAKES}({given}, {dtype}, {found.flat}, {found.narrow})"
            call = f"{CALL}({given}, {found.rounded}, {found.flat})"
            merged = ast.IfExp(rewrite.expression(condition), rewrite.expression(call), value)
            statement.value = ast.copy_location(merged, value)
            if whole is not None:
                del block[i - 1]
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


def names_connections(module: nn.Module) -> bool:
    """Whether the module adds to streams, by the names of its children and its source."""
    named = any("hyper" in name for name, _ in module.named_children())
    return named and with_mixtures(inner_function(original_class(type(module)).forward)) is not None


def adds_to_streams(module: nn.Module) -> bool:
    return has_connections(module) or names_connections(module)


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
