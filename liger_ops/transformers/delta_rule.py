"""The gates of the delta rule, which Gated DeltaNets compute before their recurrence:

    beta = b.sigmoid()                                    g, beta = liger_delta_gates(a, b, self.A_log, self.dt_bias)
    g = -self.A_log.float().exp() * F.softplus(
        a.float() + self.dt_bias
    )

Statements between both stay behind the call. See rewrite.py.
"""

from __future__ import annotations

import ast
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from . import rewrite
from .patched import inner_function, is_distributed

OPERATOR, CALL = "delta_gates", "liger_delta_gates"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def delta_gates(a: Any, b: Any, a_log: Any, dt_bias: Any) -> tuple[Any, Any]:
    """g and beta."""
    given = (a, b, a_log, dt_bias)
    if all(isinstance(t, Tensor) and t.dtype in FLOATS and not is_distributed(t) for t in given):
        heads = a.shape[-1:]
        if a.shape == b.shape and a.dtype == b.dtype and a_log.shape == heads and dt_bias.shape == heads:
            if a_log.dtype != dt_bias.dtype or a_log.dtype not in (a.dtype, torch.float32):
                a_log, dt_bias = a_log.float(), dt_bias.float()
            return F.delta_gates(a, b, a_log, dt_bias)
    beta = b.sigmoid()
    return -a_log.float().exp() * nn.functional.softplus(a.float() + dt_bias), beta


HELPERS = {CALL: delta_gates}


# ---- The statements


class Decay(NamedTuple):
    a: ast.expr
    a_log: ast.expr
    dt_bias: ast.expr


def method_of(node: ast.AST, name: str) -> ast.expr | None:
    """x if the node is ``x.name()``."""
    plain = isinstance(node, ast.Call) and not node.args and not node.keywords
    if plain and isinstance(node.func, ast.Attribute) and node.func.attr == name:  # type: ignore[attr-defined]
        return node.func.value  # type: ignore[attr-defined]
    return None


def decay_of(node: ast.expr, softplus: frozenset[str]) -> Decay | None:
    """If the node is ``-a_log.float().exp() * softplus(a.float() + dt_bias)``, where a_log and dt_bias are attributes."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.UnaryOp)):
        return None
    rate, inner = method_of(node.left.operand, "exp"), rewrite.only_argument(node.right)
    a_log = None if rate is None else method_of(rate, "float")
    if not isinstance(node.left.op, ast.USub) or not isinstance(node.right, ast.Call) or a_log is None:
        return None
    if ast.unparse(node.right.func) not in softplus:
        return None
    if not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Add)):
        return None
    a = method_of(inner.left, "float")
    if a is None or not all(is_own_attribute(t) for t in (a_log, inner.right)):
        return None
    return Decay(a, a_log, inner.right)


def is_own_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and rewrite.is_name(node.value, "self")


def names_of(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def scales(statement: ast.stmt, beta: str) -> bool:
    """Whether the statement only gives `beta` a value, perhaps on a condition, without a call."""
    assigned = [n for n in ast.walk(statement) if isinstance(n, ast.stmt) and not isinstance(n, ast.If)]
    plain = all((rewrite.simple_assignment(n) or ("",))[0] == beta for n in assigned)
    return plain and not any(isinstance(n, (ast.Call, ast.NamedExpr, ast.Await)) for n in ast.walk(statement))


def fuse_delta_gates(block: list[ast.stmt], softplus: frozenset[str], function: ast.FunctionDef) -> bool:
    for i, statement in enumerate(block):
        beta, step = rewrite.simple_assignment(statement) or ("", statement)
        b = method_of(step, "sigmoid")
        if b is None:
            continue
        for j in range(i + 1, len(block)):
            g, value = rewrite.simple_assignment(block[j]) or ("", None)
            found = decay_of(value, softplus) if value is not None else None
            if found is not None:
                between = set().union(*map(names_of, block[i + 1 : j])) if j > i + 1 else set()
                if g == beta or g in between or beta in names_of(found.a) or g in names_of(b):
                    break
                call = ast.Call(ast.Name(CALL, ast.Load()), [found.a, b, found.a_log, found.dt_bias], [])
                block[i] = rewrite.assignment((g, beta), call, statement)
                del block[j]
                return True
            if not scales(block[j], beta):
                break
    return False


def change_of(function: Any) -> Any:
    """The change for rewrite.rewritten."""
    return fuse_delta_gates, rewrite.names_of_function(inner_function(function), "softplus", nn.functional.softplus)


def with_gates(function: Any) -> Any:
    """The function's code with the gates in one call, or None if it has none."""
    function = inner_function(function)
    if not hasattr(function, "__code__") or not {"softplus", "sigmoid"} <= rewrite.names_in(function.__code__):
        return None
    found = rewrite.rewritten(function, change_of(function))
    return found.code if found else None
