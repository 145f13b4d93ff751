"""Heads of latent attention, whose last columns rotate. See docs/rewriting.md.

Keys, whose rotated columns all heads share:

    k, v = torch.split(x, [m, n], dim=-1)       k, v = liger_split(x, [m, n])
    y = x.new_empty(*x.shape[:-1], m + r)       y = liger_join(x, (*x.shape[:-1], m + r), m, k, k_rot)
    y[..., :m].copy_(k)
    y[..., m:].copy_(k_rot)

Autograd copies the whole gradient once for each copy_, joins the gradients of k and v in the order of the dimensions, and
copies them to that of memory. Ours reads and writes each gradient once.

Queries:

    a, b = torch.split(q, [m, r], dim=-1)       liger_whole_b = None
                                                a, b = torch.split(q, [m, r], dim=-1)
    b, k = rotate(b, k, cos, sin)               b, k, liger_whole_b = liger_rotate_last(rotate, q, b, k, cos, sin)
    q = torch.cat((a, b), dim=-1)               q = torch.cat((a, b), dim=-1) if liger_whole_b is None else liger_whole_b
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..reference._linear_map import LinearMap
from . import rewrite
from .patched import inner_function, is_distributed
from .rewrite import expression, is_name, simple_assignment

JOIN, SPLIT, ROTATE_LAST = "liger_join", "liger_split", "liger_rotate_last"


# ---- The functions that patched modules call


def joined(x: Tensor, shape: tuple[int, ...], columns: int, a: Tensor, b: Tensor) -> Tensor:
    y = x.new_empty(*shape[:-1], columns)
    y[..., : a.shape[-1]].copy_(a)
    y[..., a.shape[-1] :].copy_(b)
    return y


def is_differentiated(*tensors: Any) -> bool:
    """Whether autograd records what is computed of them. A compiler merges copies by itself."""
    return (
        all(isinstance(t, Tensor) and not is_distributed(t) for t in tensors)
        and torch.is_grad_enabled()
        and any(t.requires_grad for t in tensors)
        and not torch.compiler.is_compiling()
    )


def split(x: Any, sizes: Any) -> tuple[Any, ...]:
    """``torch.split(x, sizes, dim=-1)``. In backward, each gradient is copied into one tensor with the strides of x."""
    if not is_differentiated(x) or sum(sizes) != x.shape[-1]:
        return torch.split(x, sizes, dim=-1)
    shape, order = x.shape, sorted(range(x.dim()), key=lambda i: -x.stride(i))

    def written(da: Tensor, db: Tensor) -> Tensor:
        dx = torch.empty_permuted(shape, order, dtype=da.dtype, device=da.device)
        dx[..., : sizes[0]].copy_(da)
        dx[..., sizes[0] :].copy_(db)
        return dx

    return LinearMap.apply(lambda x: x.split(sizes, -1), written, x)


def join(x: Any, shape: tuple[int, ...], first: int, a: Any, b: Any) -> Any:
    """``x.new_empty(*shape)`` with a in the first columns and b in the others. Their gradients are views."""
    if is_differentiated(a, b) and x.dtype == a.dtype and x.device == a.device == b.device:
        if a.shape == (*shape[:-1], first) and b.shape == (*shape[:-1], shape[-1] - first):
            dtype = b.dtype
            return LinearMap.apply(
                lambda a, b: joined(a, a.shape, shape[-1], a, b),
                lambda d: (d[..., :first], d[..., first:].to(dtype)),
                a, b,
            )  # fmt: skip
    y = x.new_empty(*shape)
    y[..., :first].copy_(a)
    y[..., first:].copy_(b)
    return y


def rotate_last(rotate: Any, x: Any, q: Any, k: Any, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
    """``rotate(q, k, cos, sin)``, and x with its last columns q rotated, or None. `rotate` may offer the latter."""
    whole = getattr(rotate, "rotate_last", None)
    if whole is not None and isinstance(x, Tensor) and x.shape[:-1] == q.shape[:-1] and x.dtype == q.dtype:
        found = whole(x, q, k, cos, sin)
        if found is not None:
            y, k = found
            return y[..., x.shape[-1] - q.shape[-1] :], k, y
    return *rotate(q, k, cos, sin), None


HELPERS: dict[str, Callable] = {JOIN: join, SPLIT: split, ROTATE_LAST: rotate_last}


# ---- The statements of keys


def is_plain(node: ast.AST) -> bool:
    """Whether evaluating it again gives the same."""
    return all(
        isinstance(n, (ast.Name, ast.Attribute, ast.BinOp, ast.Constant, ast.operator, ast.expr_context))
        for n in ast.walk(node)
    )


def allocation_of(statement: ast.stmt) -> tuple[str, ast.expr, ast.expr] | None:
    """(y, x, shape) if the statement is ``y = x.new_empty(*shape)``."""
    y, call = simple_assignment(statement) or ("", None)
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "new_empty"):
        return None
    if call.keywords or not call.args or not isinstance(call.func.value, ast.Name):
        return None
    return y, call.func.value, ast.Tuple(call.args, ast.Load())


def copy_of(statement: ast.stmt, y: str) -> tuple[ast.expr | None, ast.expr | None, ast.expr] | None:
    """(from, to, a) if the statement is ``y[..., from:to].copy_(a)``."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    given = rewrite.only_argument(call) if call is not None else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "copy_"):
        return None
    place = call.func.value
    if not isinstance(given, ast.Name) or not isinstance(place, ast.Subscript) or not is_name(place.value, y):
        return None
    index = place.slice.elts if isinstance(place.slice, ast.Tuple) else []
    if len(index) != 2 or ast.unparse(index[0]) != "..." or not isinstance(index[1], ast.Slice) or index[1].step:
        return None
    return index[1].lower, index[1].upper, given


def fuse_joins(block: list[ast.stmt], _: frozenset[str], function: ast.FunctionDef) -> bool:
    for i in range(len(block) - 2):
        made = allocation_of(block[i])
        if made is None:
            continue
        y, x, shape = made
        one, other = copy_of(block[i + 1], y), copy_of(block[i + 2], y)
        if one is None or other is None:
            continue
        (low, first, a), (rest, high, b) = one, other
        if low or high or first is None or rest is None or not is_plain(first) or ast.dump(first) != ast.dump(rest):
            continue
        call = ast.Call(ast.Name(JOIN, ast.Load()), [x, shape, first, a, b], [])
        block[i : i + 3] = [ast.copy_location(ast.Assign([ast.Name(y, ast.Store())], call), block[i])]
        return True
    return False


def split_of(statement: ast.stmt, splits: frozenset[str]) -> tuple[str, str, ast.Call] | None:
    """(a, b, call) if the statement is ``a, b = torch.split(x, [m, n], dim=-1)`` for a name x."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], statement.value
    names = [t.id for t in target.elts if isinstance(t, ast.Name)] if isinstance(target, ast.Tuple) else []
    if len(names) != 2 or len(target.elts) != 2 or not isinstance(call, ast.Call) or len(call.args) != 2:  # type: ignore[attr-defined]
        return None
    if ast.unparse(call.func) not in splits or [ast.unparse(k) for k in call.keywords] != ["dim=-1"]:
        return None
    sizes = call.args[1]
    if not isinstance(call.args[0], ast.Name) or not isinstance(sizes, ast.List) or len(sizes.elts) != 2:
        return None
    return names[0], names[1], call


def fuse_splits(block: list[ast.stmt], splits: frozenset[str], function: ast.FunctionDef) -> bool:
    for statement in block:
        found = split_of(statement, splits)
        if found is not None and isinstance(statement, ast.Assign):
            statement.value = ast.copy_location(ast.Call(ast.Name(SPLIT, ast.Load()), found[2].args, []), found[2])
            return True
    return False


def with_joins(function: Any) -> Any:
    """The function's code with these calls, or None if it joins nothing."""
    function = inner_function(function)
    if not hasattr(function, "__code__") or not {"new_empty", "copy_"} <= rewrite.names_in(function.__code__):
        return None
    splits = rewrite.names_of_function(function, "split", torch.split)
    found = rewrite.rewritten(function, (fuse_joins, frozenset()), (fuse_splits, splits))
    return found.code if found and found.applied[0] else None


# ---- The statements of queries


def cat_of(statement: ast.stmt, parts: tuple[str, str]) -> ast.Assign | None:
    """The statement if it is ``y = torch.cat((a, b), dim=-1)``."""
    y, call = simple_assignment(statement) or ("", None)
    if not isinstance(statement, ast.Assign) or not isinstance(call, ast.Call) or len(call.args) != 1:
        return None
    given = call.args[0]
    names = [getattr(n, "id", "") for n in given.elts] if isinstance(given, (ast.Tuple, ast.List)) else []
    if ast.unparse(call.func) != "torch.cat" or [ast.unparse(k) for k in call.keywords] != ["dim=-1"]:
        return None
    return statement if (*names,) == parts and y else None


def rotation_of(statement: ast.stmt, q: str, rotary: frozenset[str]) -> ast.Assign | None:
    """The statement if it is ``q, k = rotate(q, k, cos, sin)``."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, call = statement.targets[0], statement.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in rotary):
        return None
    names = [getattr(t, "id", "") for t in target.elts] if isinstance(target, ast.Tuple) else []
    given = [getattr(a, "id", "") for a in call.args]
    plain = len(given) == 4 and all(given) and not call.keywords
    return statement if plain and names == given[:2] and names[0] == q else None


def rotations_of(statement: ast.stmt, q: str, rotary: frozenset[str]) -> list[ast.Assign]:
    """This rotation, or those in its branches, where each must be alone."""
    branches = [statement.body, statement.orelse] if isinstance(statement, ast.If) else [[statement]]
    found = [rotation_of(s, q, rotary) for branch in branches if len(branch) == 1 for s in branch]
    return [rotation for rotation in found if rotation is not None]


def fuse_queries(block: list[ast.stmt], rotary: frozenset[str], function: ast.FunctionDef) -> bool:
    if block is not function.body:
        return False
    for i, statement in enumerate(block):
        parts = split_of(statement, frozenset({"torch.split"}))
        if parts is None:
            continue
        a, b, call = parts
        x, whole = call.args[0].id, f"liger_whole_{b}"  # type: ignore[attr-defined]
        end = next((j for j in range(i + 1, len(block)) if cat_of(block[j], (a, b))), 0)
        between = block[i + 1 : end]
        rotations = [(s, found) for s in between if (found := rotations_of(s, b, rotary))]
        if len(rotations) != 1 or len({a, b, x}) < 3:
            continue
        ((place, found),) = rotations
        written = [
            s for s in between for name in (a, b, x) if rewrite.writes(s, name) and not (s is place and name == b)
        ]
        if written or rewrite.is_read_later(whole, block, function):
            continue
        merge_queries(block, i, end, x, whole, found)
        return True
    return False


def rotating_last(function: Any, used: dict[str, Any], rotary: dict[Any, Any]) -> frozenset[str]:
    """Names of the functions that may rotate the last columns of whole heads."""
    if "torch.split" not in rewrite.names_of_function(function, "split", torch.split):
        return frozenset()
    kinds = {name: rotary[f] for name, f in used.items() if f in rotary}
    return frozenset(name for name, found in kinds.items() if (found.kind, found.tensors) == ("pairs to halves", 2))


def merge_queries(block: list[ast.stmt], start: int, end: int, x: str, whole: str, rotations: list[ast.Assign]) -> None:
    cat = block[end]
    assert isinstance(cat, ast.Assign)
    choice = ast.IfExp(expression(f"{whole} is None"), cat.value, ast.Name(whole, ast.Load()))
    cat.value = ast.copy_location(choice, cat.value)
    for rotation in rotations:
        call, target = rotation.value, rotation.targets[0]
        assert isinstance(call, ast.Call) and isinstance(target, ast.Tuple)
        target.elts.append(ast.Name(whole, ast.Store()))
        given = [call.func, ast.Name(x, ast.Load()), *call.args]
        rotation.value = ast.copy_location(ast.Call(ast.Name(ROTATE_LAST, ast.Load()), given, []), call)
    none = ast.Assign([ast.Name(whole, ast.Store())], expression("None"))
    block.insert(start, ast.copy_location(none, block[start]))
