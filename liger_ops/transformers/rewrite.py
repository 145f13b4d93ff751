"""What a model's source says in two statements and operators do in one, found in the source of its forwards.

    q = self.q_proj(x) ...                 projections of one input, or one alone
    k = self.k_proj(x) ...
    v = self.v_proj(x) ...

    residual = h                           a residual that a norm reads too: its two gradients meet in the norm's
    h = self.norm(h)

    h = residual + h                       the sum of a residual, which the next norm reads
    residual = h
    h = self.norm(h)

A function is rewritten only if its source compiles to the very code that it runs, and only in these statements. What the
modules are is looked up in every call: whoever wraps or hooks one of them is called as before.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .. import functional as F
from ..projections import has_hooks, project, saves_passes
from . import probe

PROJECT, KEEP_NORM, ADD_NORM = "liger_project", "liger_keep_norm", "liger_add_norm"


def bare_rms_norm(norm: Any, x: Tensor) -> probe.Norm | None:
    """What a patched norm computes of x, if nobody wraps or hooks it."""
    found = getattr(type(norm), "liger_norm", None)
    if found is None or found.op != "rms_norm" or "forward" in norm.__dict__ or has_hooks(norm):
        return None
    if probe.is_distributed(x) or probe.is_distributed(norm.weight):
        return None
    return found if norm.weight is None or norm.weight.dtype == x.dtype else None


class _NormBesideInput(torch.autograd.Function):
    """rms_norm(x) and x, whose gradients one kernel adds up."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, offset: float, mode: str
    ) -> tuple[Tensor, Tensor]:
        y, rstd = torch.ops.liger._rms_norm_fwd(x, weight, eps, offset, mode)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = offset, mode
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None) -> tuple[Any, ...]:
        x, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dx, None, None, None, None
        wanted = ctx.needs_input_grad[0] | 2 * ctx.needs_input_grad[1]
        dx, dweight = torch.ops.liger._rms_norm_bwd(dy, dx, x, weight, rstd, wanted, *ctx.options)
        return dx, dweight if ctx.needs_input_grad[1] else None, None, None, None


def keep_norm(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(x)`` and ``x``."""
    found = bare_rms_norm(norm, x) if saves_passes(x) else None
    if found is None:
        return norm(x), x
    eps = probe.epsilon_of(norm, found.epsilon, x)
    return _NormBesideInput.apply(x, norm.weight, eps, found.offset, found.casting_mode)


def add_norm(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(x + residual)`` and ``x + residual``."""
    found = bare_rms_norm(norm, x) if x.dtype == residual.dtype and x.shape == residual.shape else None
    if found is None:
        total = residual + x
        return norm(total), total
    eps = probe.epsilon_of(norm, found.epsilon, x)
    return F.fused_add_rms_norm(x, residual, norm.weight, eps, found.offset, found.casting_mode)


HELPERS: dict[str, Callable] = {PROJECT: project, KEEP_NORM: keep_norm, ADD_NORM: add_norm}


def child_called(node: ast.AST) -> tuple[str, str] | None:
    """(child, argument) where the node is ``self.child(argument)``."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
        and not node.keywords
    ):
        return node.func.attr, node.args[0].id
    return None


def writes(node: ast.AST, name: str) -> bool:
    """Whether a name may hold something else, or its tensor other numbers, after what is below the node."""
    for below in ast.walk(node):
        if isinstance(below, ast.Name) and below.id == name and not isinstance(below.ctx, ast.Load):
            return True
        if isinstance(below, ast.Attribute) and is_name(below.value, name) and below.attr.endswith("_"):
            return True
    return False


def may_change(statement: ast.stmt, name: str) -> bool:
    """Whether that holds for a statement, or the next one may not be reached."""
    return not isinstance(statement, ast.Assign) or writes(statement, name)


def always_evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what is below it, except for what may be evaluated later, more than once, or not at all."""
    yield node
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    below: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.IfExp):
        below = [node.test]
    elif isinstance(node, ast.BoolOp):
        below = node.values[:1]
    for child in below:
        yield from always_evaluated(child)


def blocks_of(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def share_projections(block: list[ast.stmt], linears: frozenset[str], function: ast.FunctionDef) -> bool:
    """Makes one call of all calls of `linears` with one name, between which the name keeps its value."""
    calls: dict[str, list[tuple[int, ast.AST, str]]] = {}
    for position, statement in enumerate(block):
        if not isinstance(statement, ast.Assign):
            continue
        for node in always_evaluated(statement):
            child, argument = child_called(node) or ("", "")
            if child in linears:
                calls.setdefault(argument, []).append((position, node, child))
    for argument, found in calls.items():
        first, last = found[0][0], found[-1][0]
        names = [child for _, _, child in found]
        if len(set(names)) < len(names):
            continue
        end = block[last]
        if any(may_change(statement, argument) for statement in block[first:last]):
            continue
        if not isinstance(end, ast.Assign) or writes(end.value, argument):
            continue
        outputs = [f"liger_{child}" for child in names]
        for (_, old, _), output in zip(found, outputs):
            replace_node(block, old, ast.Name(output, ast.Load()))
        call = f"{PROJECT}(({', '.join('self.' + child for child in names)},), {argument})"
        block.insert(first, assignment(outputs, expression(call), block[first]))
        return True
    return False


def assignment(names: Iterable[str], value: ast.expr, place: ast.stmt) -> ast.stmt:
    targets = ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())
    return ast.copy_location(ast.Assign([targets], value), place)


def replace_node(block: list[ast.stmt], old: ast.AST, new: ast.expr) -> None:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return ast.copy_location(new, node) if node is old else self.generic_visit(node)

    for i, statement in enumerate(block):
        block[i] = Replace().visit(statement)


def is_name(node: ast.AST, name: str) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and node.id == name


def assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, value) where the statement is ``name = value``."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None


def fuse_sums(block: list[ast.stmt], norms: frozenset[str], function: ast.FunctionDef) -> bool:
    """Makes one statement of a ``h = residual + x; residual = h; h = self.norm(h)``."""
    for i in range(len(block) - 2):
        total, kept, normed = map(assigned, block[i : i + 3])
        if total is None or kept is None or normed is None:
            continue
        (h, summed), (residual, copied), (result, called) = total, kept, normed
        if h == residual or result != h or not is_name(copied, h):
            continue
        if not (isinstance(summed, ast.BinOp) and isinstance(summed.op, ast.Add)):
            continue
        child, argument = child_called(called) or ("", "")
        added = [side for side in (summed.left, summed.right) if not is_name(side, residual)]
        if child not in norms or argument != h or len(added) != 1:
            continue
        call: Any = expression(f"{ADD_NORM}(self.{child}, None, {residual})")
        call.args[1] = added[0]
        block[i : i + 3] = [assignment((h, residual), call, block[i + 2])]
        return True
    return False


def keep_inputs(block: list[ast.stmt], norms: frozenset[str], function: ast.FunctionDef) -> bool:
    """Makes one statement of a ``residual = h; h = self.norm(h)``, if all that follows from the residual is sums."""
    for i in range(len(block) - 1):
        kept, normed = map(assigned, block[i : i + 2])
        if kept is None or normed is None:
            continue
        (residual, copied), (h, called) = kept, normed
        if h == residual or not is_name(copied, h):
            continue
        child, argument = child_called(called) or ("", "")
        if child not in norms or argument != h or not only_added(residual, function):
            continue
        block[i : i + 2] = [assignment((h, residual), expression(f"{KEEP_NORM}(self.{child}, {h})"), block[i + 1])]
        return True
    return False


def only_added(name: str, function: ast.FunctionDef) -> bool:
    """Whether a function reads a name in sums alone: nobody then writes to the tensor, or asks what it is."""
    added: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign) and is_name(node.target, name):
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            added |= {id(node.left), id(node.right)}
        if isinstance(node, ast.Call) and is_name(node.func, ADD_NORM):
            added |= set(map(id, node.args))
    reads = (n for n in ast.walk(function) if is_name(n, name) and isinstance(n.ctx, ast.Load))
    return all(id(node) in added for node in reads)


def definition_of(code: types.CodeType, module: ast.Module) -> ast.FunctionDef | None:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            if code.co_firstlineno == min([node.lineno, *(d.lineno for d in node.decorator_list)]):
                return node
    return None


def code_within(module: types.CodeType, like: types.CodeType) -> types.CodeType | None:
    for constant in module.co_consts:
        if isinstance(constant, types.CodeType):
            if (constant.co_name, constant.co_firstlineno) == (like.co_name, like.co_firstlineno):
                return constant
            if (found := code_within(constant, like)) is not None:
                return found
    return None


Change = Callable[[list[ast.stmt], frozenset[str], ast.FunctionDef], bool]


def change_all(change: Change, function: ast.FunctionDef, children: frozenset[str]) -> bool:
    found = False
    for block in list(blocks_of(function)):
        while change(block, children, function):
            found = True
    return found


@functools.lru_cache(None)
def rewritten(
    function: types.FunctionType, changes: tuple[Change, ...], children: frozenset[str]
) -> types.CodeType | None:
    """The function's code after these changes, one after the other; None if the first finds nothing to change."""
    try:
        code = function.__code__
        source = "".join(inspect.findsource(function)[0])
        module = ast.parse(source)
        plain = code_within(compile(source, code.co_filename, "exec", dont_inherit=True), code)
    except (AttributeError, OSError, SyntaxError):
        return None
    definition = definition_of(code, module)
    if plain is None or definition is None or plain.co_code != code.co_code:
        return None
    # The whole module once more: how a name is called depends on whether the module imports it.
    for i, change in enumerate(changes):
        if not change_all(change, definition, children) and i == 0:
            return None
    return code_within(compile(ast.fix_missing_locations(module), code.co_filename, "exec", dont_inherit=True), code)


def with_shared_projections(function: types.FunctionType, linears: frozenset[str]) -> types.CodeType | None:
    """The function's code with the calls of these children brought together; None where there are none."""
    return rewritten(function, (share_projections,), linears)


def with_fused_sums(function: types.FunctionType, norms: frozenset[str]) -> types.CodeType | None:
    """The function's code with the sums that these children read taken into their calls; None where there are none."""
    return rewritten(function, (fuse_sums, keep_inputs), norms)


def projections_of(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module.named_children() if type(child) is nn.Linear)
