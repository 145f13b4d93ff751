"""Attention: the norms of q's and k's heads and the rotation that follows become one operator. See docs/rewriting.md.

    q = self.q_norm(x).transpose(1, 2)      q, liger_norm_of_q = liger_delay_norm(self.q_norm, x)
                                            q = q.transpose(1, 2)
    k = self.k_norm(y).transpose(1, 2)      ...
    q, k = rotate(q, k, cos, sin)           q, k = liger_norm_and_rotate(
                                                rotate, (liger_norm_of_q, liger_norm_of_k), q, k, cos, sin)

A norm of heads may be delayed over transpositions of the other dimensions. Norm and rotation may be in an `if` each.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..linear.layers import autocast_dtype
from . import rewrite
from .patched import epsilon_of
from .rewrite import assignment, expression, is_name, simple_assignment

DELAY, NORM_AND_ROTATE, NORM_HEADS = "liger_delay_norm", "liger_norm_and_rotate", "liger_norm_heads"

# Attributes that a norm does not change.
KEPT = ("shape", "dtype", "device")


class HeadNorms(NamedTuple):
    """RMS norms of the heads that a rotation takes; all have the same options."""

    weights: tuple[Tensor | None, ...]  # one for each tensor
    eps: float
    offset: float
    casting_mode: str


def delay_norm(norm: Any, x: Tensor) -> tuple[Tensor, Any]:
    """``x`` and the norm, which is then applied with the rotation, or ``norm(x)`` and None."""
    # Under autocast, a weight in fp32 would make q and k fp32, which attention casts back.
    wider = autocast_dtype(x) is not None
    if x.dim() == 4 and rewrite.bare_rms_norm(norm, x, wider) is not None:
        return x, norm
    return norm(x), None


def norm_heads(norms: tuple[Any, ...], *heads: Tensor) -> tuple[Tensor, ...]:
    """The heads after the norms that were delayed."""
    return tuple(x if norm is None else norm(x) for norm, x in zip(norms, heads))


def norm_and_rotate(rotate: Callable, norms: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
    """``rotate(*arguments, **options)`` after the norms of its first arguments that were delayed."""
    count = len(norms)
    found = common_norms(norms, arguments[0]) if getattr(rotate, "takes_norms", 0) == count else None
    if found is None:
        return rotate(*norm_heads(norms, *arguments[:count]), *arguments[count:], **options)
    return rotate(*arguments, norms=found, **options)


def common_norms(norms: tuple[Any, ...], x: Tensor) -> HeadNorms | None:
    """The norms' weights and options, or None if the options differ or a norm was not delayed."""
    if any(norm is None for norm in norms):
        return None
    options = [options_of(norm, x) for norm in norms]
    dtypes = [norm.weight.dtype for norm in norms if norm.weight is not None]
    if any(o != options[0] for o in options) or any(dtype != dtypes[0] for dtype in dtypes):
        return None
    return HeadNorms(tuple(norm.weight for norm in norms), *options[0])


def options_of(norm: Any, x: Tensor) -> tuple[float, float, str]:
    found = type(norm).liger_norm
    return epsilon_of(norm, found.epsilon, x), found.offset, found.casting_mode


HELPERS: dict[str, Callable] = {DELAY: delay_norm, NORM_AND_ROTATE: norm_and_rotate, NORM_HEADS: norm_heads}


class Norm(NamedTuple):
    block: list[ast.stmt]
    statement: ast.Assign
    call: ast.Call  # self.norm(x)
    transposed: bool
    # The outermost `if` around the statement that is not around the rotation, and its block.
    condition: tuple[list[ast.stmt], ast.stmt] | None


class Rotation(NamedTuple):
    statement: ast.Assign
    call: ast.Call
    names: tuple[str, ...]  # of the tensors that are rotated
    condition: ast.If | None


def uses(node: ast.AST, name: str) -> bool:
    """Whether the code below the node reads or writes the name's values."""
    kept = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr in KEPT}
    return any(is_name(n, name) and id(n) not in kept for n in ast.walk(node))


def uses_any(nodes: list[Any], names: tuple[str, ...]) -> bool:
    return any(uses(node, name) for node in nodes for name in names)


def untransposed(node: ast.expr) -> ast.expr | None:
    """x if the node is ``x.transpose(1, 2)``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "transpose":
        if not node.keywords and [getattr(a, "value", None) for a in node.args] in ([1, 2], [2, 1]):
            return node.func.value
    return None


def child_of(node: ast.AST) -> str | None:
    """The child if the node is ``self.child(x)`` for any x."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_name(node.func.value, "self"):
        if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred):
            return node.func.attr
    return None


def rotation_of(statement: ast.stmt, names: frozenset[str], condition: ast.If | None = None) -> Rotation | None:
    """The rotation if the statement is ``q, k = rotate(q, k, ...)`` or ``q = rotate(q, ...)``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in names:
        return None
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    rotated = tuple(t.id for t in targets if isinstance(t, ast.Name))
    given, others = call.args[: len(targets)], call.args[len(targets) :]
    if not len(set(rotated)) == len(given) == len(targets) or not all(map(is_name, given, rotated)):
        return None
    if uses_any([*others, *call.keywords], rotated):
        return None
    return Rotation(statement, call, rotated, condition)


def rotations_at(statement: ast.stmt, names: frozenset[str]) -> list[Rotation]:
    """The statement, or one in it if it is an `if` that does not use the rotated tensors before."""
    if not isinstance(statement, ast.If):
        found = rotation_of(statement, names)
        return [found] if found else []
    inside = [(i, rotation_of(s, names, statement)) for i, s in enumerate(statement.body)]
    return [r for i, r in inside if r and not uses_any([statement.test, *statement.body[:i]], r.names)]


def norm_before(block: list[ast.stmt], end: int, name: str, norms: frozenset[str]) -> Norm | None:
    """The norm whose result the name has at block[end], except for transpositions."""
    for statement in reversed(block[:end]):
        if not uses(statement, name):
            continue
        if isinstance(statement, ast.If) and not statement.orelse and not uses(statement.test, name):
            found = norm_before(statement.body, len(statement.body), name, norms)
            return found and found._replace(condition=(block, statement))
        target, value = simple_assignment(statement) or ("", None)
        if target != name or value is None or not isinstance(statement, ast.Assign):
            return None
        inner = untransposed(value)
        if inner is not None and is_name(inner, name):
            continue
        call = value if inner is None else inner
        if child_of(call) not in norms or not isinstance(call, ast.Call):
            return None
        return Norm(block, statement, call, inner is not None, None)
    return None


def fuse_head_norms(block: list[ast.stmt], names: frozenset[str], function: ast.FunctionDef) -> bool:
    """Merges norms with the rotation of their results. `names`: children that are norms, and rotary functions."""
    for i, statement in enumerate(block):
        for rotation in rotations_at(statement, names):
            found = [norm_before(block, i, name, names) for name in rotation.names]
            norms = [norm for norm in found if norm is not None]
            if len(norms) == len(found):
                merge(rotation, norms)
                return True
    return False


def merge(rotation: Rotation, norms: list[Norm]) -> None:
    delayed = [f"liger_norm_of_{name}" for name in rotation.names]
    for name, kept, norm in zip(rotation.names, delayed, norms):
        call = expression(f"{DELAY}(None, None)")
        assert isinstance(call, ast.Call)
        call.args = [norm.call.func, norm.call.args[0]]
        new = [assignment((name, kept), call, norm.statement)]
        if norm.transposed:
            new.append(one_assignment(name, expression(f"{name}.transpose(1, 2)"), norm.statement))
        at = position_of(norm.block, norm.statement)
        norm.block[at : at + 1] = new
        if norm.condition is not None:
            block, condition = norm.condition
            block.insert(position_of(block, condition), one_assignment(kept, expression("None"), condition))
    call = rotation.call
    given: list[ast.expr] = [ast.Name(kept, ast.Load()) for kept in delayed]
    rotation.statement.value = ast.copy_location(
        ast.Call(
            ast.Name(NORM_AND_ROTATE, ast.Load()), [call.func, ast.Tuple(given, ast.Load()), *call.args], call.keywords
        ),
        call,
    )
    if rotation.condition is not None:
        text = f"{NORM_HEADS}(({', '.join(delayed)},), {', '.join(rotation.names)})"
        otherwise = assignment(rotation.names, expression(text), rotation.condition)
        rotation.condition.orelse.insert(0, otherwise)


def one_assignment(name: str, value: ast.expr, place: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), place)


def position_of(block: list[ast.stmt], statement: ast.stmt) -> int:
    return next(i for i, s in enumerate(block) if s is statement)


def why_separate(function: types.FunctionType, norms: Mapping[str, str], rotary: frozenset[str]) -> str:
    """Why the norms of tensors that the function rotates are not merged with the rotation; empty if there are none.

    norms: what is wrong with each child that looks like a norm, or "".
    """
    found = rewrite.parsed(function)
    statements = [s for s in ast.walk(found[1]) if isinstance(s, ast.Assign)] if found else []
    for rotation in filter(None, (rotation_of(s, rotary) for s in statements)):
        for statement in statements:
            changed = [name for target in statement.targets for name in rotation.names if is_name(target, name)]
            children = [child for node in ast.walk(statement.value) if (child := child_of(node) or "") in norms]
            if not changed or not children:
                continue
            child = children[0]
            if statement.lineno > rotation.statement.lineno:
                return f"{child} follows the rotation"
            return (
                norms[child] and f"{child} {norms[child]}" or f"{changed[0]} changes between {child} and the rotation"
            )
    return ""
