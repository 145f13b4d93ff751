"""The statements of a convolution between two gates, as in Lfm2:

    rows = self.in_proj(h).transpose(-1, -2)
    b, c, x = rows.chunk(3, dim=-2)
    h = b * x
    if conv_state is not None ...:
        h = causal_conv1d_update(h, ...)
    else:
        ...
        h = causal_conv1d_fn(h, ...)
    y = c * h
    y = y.transpose(-1, -2).contiguous()

Without a cache, one call of `short_conv` computes them:

    rows = self.in_proj(h)
    liger_gated = liger_short_causal_conv1d_fn(rows, ...) if cache is None and not ... else None
    if liger_gated is not None:
        y = liger_gated
    else:
        rows = rows.transpose(-1, -2)
        ...
"""

from __future__ import annotations

import ast
import copy
from typing import Any, NamedTuple

from . import rewrite
from . import split_convolutions as splits
from .patched import inner_function

OPERATOR = "short_conv"
SHORT, GATED = "liger_short_", "liger_gated"
AXES = "-1, -2"


def product_of(statement: ast.stmt, a: str, b: str) -> str:
    """y if the statement is ``y = a * b``, or ""."""
    name, value = rewrite.simple_assignment(statement) or ("", statement)
    return name if ast.unparse(value) in (f"{a} * {b}", f"{b} * {a}") else ""


class Found(NamedTuple):
    convolved: int  # position of the statement that convolves; two follow
    rows: str
    before: ast.expr  # what is transposed
    names: set[str]  # that the statements assign, but for the result
    convolution: splits.Convolved
    result: str


def region_at(block: list[ast.stmt], first: int, functions: frozenset[str]) -> Found | None:
    """The statements that begin at `first`."""
    rows, value = rewrite.simple_assignment(block[first]) or ("", block[first])
    before = splits.transposed(value, AXES)
    thirds = block[first + 1] if first + 2 < len(block) else None
    if before is None or not isinstance(thirds, ast.Assign) or len(thirds.targets) != 1:
        return None
    parts = splits.names_in_tuple(thirds.targets[0])
    if len(parts) != 3 or ast.unparse(thirds.value) != f"{rows}.chunk(3, dim=-2)":
        return None
    mixed = product_of(block[first + 2], parts[0], parts[2])
    names = {rows, mixed, *parts}
    if not mixed or len(names) != 5:
        return None
    for i in range(first + 3, len(block) - 2):
        if not any(splits.mentions(block[i], name) for name in names):
            continue
        convolution = splits.convolved(block[i], mixed, functions)
        result = product_of(block[i + 1], parts[1], mixed)
        if convolution is None or not result:
            return None
        if ast.unparse(block[i + 2]) != f"{result} = {result}.transpose({AXES}).contiguous()":
            return None
        # Conditions and arguments are evaluated before the names are assigned.
        read = [*map(rewrite.expression, convolution.conditions), *convolution.call.args[1:]]
        read += [keyword.value for keyword in convolution.call.keywords]
        if any(splits.mentions(node, name) for node in read for name in names):
            return None
        return Found(i, rows, before, names - {result}, convolution, result)
    return None


def fuse_short(block: list[ast.stmt], functions: frozenset[str], function: ast.FunctionDef) -> bool:
    if block is not function.body:
        return False
    for first, place in enumerate(block):
        found = region_at(block, first, functions)
        if found is None:
            continue
        last = found.convolved + 2
        if any(rewrite.is_read_later(name, block[last + 1 :], function) for name in found.names):
            continue
        call, rows = found.convolution.call, found.rows
        middle = block[first + 3 : found.convolved]
        turn = ast.Assign([ast.Name(rows, ast.Store())], rewrite.expression(f"{rows}.transpose({AXES})"))
        original = [turn, *block[first + 1 : first + 3], *block[found.convolved : last + 1]]
        name = SHORT + call.func.id  # type: ignore[attr-defined]
        arguments = [ast.Name(rows, ast.Load()), *call.args[1:]]
        fused = ast.Call(ast.Name(name, ast.Load()), arguments, call.keywords)
        test = rewrite.expression(" and ".join(found.convolution.conditions))
        made = ast.Assign([ast.Name(rows, ast.Store())], found.before)
        attempt = ast.Assign([ast.Name(GATED, ast.Store())], ast.IfExp(test, fused, ast.Constant(None)))
        chosen = ast.Assign([ast.Name(found.result, ast.Store())], ast.Name(GATED, ast.Load()))
        branch = ast.If(rewrite.expression(f"{GATED} is not None"), [chosen], copy.deepcopy(original))
        block[first : last + 1] = [ast.copy_location(s, place) for s in (made, *middle, attempt, branch)]
        return True
    return False


def with_short(function: Any, functions: frozenset[str]) -> tuple[Any, Any] | None:
    """The change for rewrite.rewritten, or None if the function has no such statements."""
    inner = inner_function(function)
    if not hasattr(inner, "__code__") or not {"chunk", "transpose"} <= rewrite.names_in(inner.__code__):
        return None
    return (fuse_short, functions)
