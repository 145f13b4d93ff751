"""Rewrites the source of a forward so that one call replaces several statements. See docs/rewriting.md.

Projections of one input (or a single projection):

    q = self.q_proj(x) ...                 liger_q_proj, liger_k_proj = liger_project((self.q_proj, self.k_proj), x)
    k = self.k_proj(x) ...                 q = liger_q_proj ...
                                           k = liger_k_proj ...

A norm whose input is also the residual (one backward kernel adds both gradients):

    residual = h                           h, residual = liger_norm_and_input(self.norm, h)
    h = self.norm(h)

A residual addition and the norm that follows:

    h = residual + h                       h, residual = liger_add_norm(self.norm, h, residual)
    residual = h
    h = self.norm(h)

A gate:

    y = y * torch.sigmoid(self.gate(x))    y = liger_gate(y, self.gate(x))

A gate and the addition that follows:

    y = y * torch.sigmoid(self.gate(x))    h = liger_gate(y, self.gate(x), h)
    h = h + y

Norms of heads and the rotation that follows: head_norms.py.

A function is rewritten only if its source compiles to the bytecode that it runs. The helpers look modules up in every
call, so wrapped or hooked modules are still called.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from .. import functional as F
from .._runtime.static import static
from ..linear.layers import has_hooks
from ..linear.project import is_projection, project, saves_passes
from ..reference._wanted import WANT_INPUT, WANT_WEIGHT
from .patched import Norm, epsilon_of, inner_function, is_distributed
from .reads import unchanged

PROJECT, NORM_AND_INPUT, ADD_NORM, GATE = "liger_project", "liger_norm_and_input", "liger_add_norm", "liger_gate"


def bare_rms_norm(norm: Any, x: Tensor, wider_weight: bool = False) -> Norm | None:
    """The formula of a patched RMSNorm, or None if its forward must be called: it is hooked, wrapped or distributed, or
    its weight has another dtype than x. wider_weight: the weight may be fp32."""
    found = getattr(type(norm), "liger_norm", None)
    if found is None or found.op != "rms_norm" or "forward" in norm.__dict__ or has_hooks(norm):
        return None
    if not unchanged(norm, type(norm).liger_reads):
        return None
    if is_distributed(x) or is_distributed(norm.weight):
        return None
    fits = norm.weight is None or norm.weight.dtype == x.dtype or (wider_weight and norm.weight.dtype == torch.float32)
    return found if fits else None


class _NormAndInput(torch.autograd.Function):
    """rms_norm(x) and x. In backward, one kernel adds the gradients of both."""

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
        needs = ctx.needs_input_grad
        wanted = WANT_INPUT * needs[0] | WANT_WEIGHT * needs[1]
        dx, dweight = torch.ops.liger._rms_norm_bwd(dy, dx, x, weight, rstd, wanted, *ctx.options)
        return dx, dweight if ctx.needs_input_grad[1] else None, None, None, None


def norm_and_input(norm: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(x)`` and ``x``."""
    found = bare_rms_norm(norm, x) if saves_passes(x) else None
    if found is None:
        return norm(x), x
    numbers = static(epsilon_of(norm, found.epsilon, x), found.offset)
    return _NormAndInput.apply(x, norm.weight, *numbers, found.casting_mode)


def add_norm(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(x + residual)`` and ``x + residual``."""
    found = bare_rms_norm(norm, x) if x.dtype == residual.dtype and x.shape == residual.shape else None
    if found is None:
        total = residual + x
        return norm(total), total
    eps = epsilon_of(norm, found.epsilon, x)
    return F.fused_add_rms_norm(x, residual, norm.weight, eps, found.offset, found.casting_mode)


def project_without_lora(linears: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
    return project(linears, x, lora=False)


def gate(x: Any, g: Any, residual: Any = None) -> Any:
    """x * sigmoid(g), added to the residual if there is one."""
    if isinstance(x, Tensor) and isinstance(g, Tensor) and x.dtype == g.dtype and 0 < x.dim() == g.dim():
        one_per_row = g.shape[-1] == 1 and g.shape[:-1] == x.shape[:-1]
        if (
            x.is_floating_point()
            and (one_per_row or g.shape == x.shape)
            and not (is_distributed(x) or is_distributed(g))
        ):
            if residual is None:
                return F.sigmoid_gate(x, g)
            if (
                isinstance(residual, Tensor)
                and residual.shape == x.shape
                and residual.dtype == x.dtype
                and not is_distributed(residual)
            ):
                return F.sigmoid_gate(x, g, residual)
    y = x * torch.sigmoid(g)
    return y if residual is None else residual + y


HELPERS: dict[str, Callable] = {PROJECT: project, NORM_AND_INPUT: norm_and_input, ADD_NORM: add_norm, GATE: gate}


# Their code may run later than where they stand.
LATER = (ast.FunctionDef, ast.Lambda, ast.GeneratorExp)


def child_called(node: ast.AST) -> tuple[str, str] | None:
    """(child, argument) if the node is ``self.child(argument)``."""
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
    """Whether the code below the node may rebind the name, or write to its tensor, as ``x[0] = y``, ``x.mul_()``,
    ``torch.relu_(x)`` or ``out=x`` do."""
    for below in ast.walk(node):
        if isinstance(below, ast.Name) and below.id == name and not isinstance(below.ctx, ast.Load):
            return True
        if isinstance(below, (ast.Attribute, ast.Subscript)) and is_name(below.value, name):
            if isinstance(below.ctx, ast.Store) or getattr(below, "attr", "").endswith("_"):
                return True
        if isinstance(below, ast.Call):
            function = getattr(below.func, "attr", getattr(below.func, "id", ""))
            given = [k.value for k in below.keywords if k.arg == "out"] + (below.args if function.endswith("_") else [])
            if any(is_name(argument, name) for argument in given):
                return True
    return False


def may_change(statement: ast.stmt, name: str) -> bool:
    """Whether the statement may change the name, or may keep the next statement from running."""
    return not isinstance(statement, ast.Assign) or writes(statement, name)


def always_evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """The node and its descendants, except those that may be evaluated later, more than once, or never."""
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
    """Merges the calls of `linears` with the same name as argument, if the name keeps its value between the calls."""
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


def simple_assignment(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, value) if the statement is ``name = value``."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None


def fuse_add_norm(block: list[ast.stmt], norms: frozenset[str], function: ast.FunctionDef) -> bool:
    """Merges ``h = residual + x; residual = h; h = self.norm(h)`` into one statement."""
    for i in range(len(block) - 2):
        total, kept, normed = map(simple_assignment, block[i : i + 3])
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


def fuse_norm_and_input(block: list[ast.stmt], norms: frozenset[str], function: ast.FunctionDef) -> bool:
    """Merges ``residual = h; h = self.norm(h)`` into one statement, if the residual is read only in additions."""
    for i in range(len(block) - 1):
        kept, normed = map(simple_assignment, block[i : i + 2])
        if kept is None or normed is None:
            continue
        (residual, copied), (h, called) = kept, normed
        if h == residual or not is_name(copied, h):
            continue
        child, argument = child_called(called) or ("", "")
        if child not in norms or argument != h or not only_added(residual, function):
            continue
        block[i : i + 2] = [assignment((h, residual), expression(f"{NORM_AND_INPUT}(self.{child}, {h})"), block[i + 1])]
        return True
    return False


def names_of_function(function: Any, name: str, *wanted: Any) -> frozenset[str]:
    """How the function may call one of torch's functions `wanted`, all called `name`."""
    scope = getattr(function, "__globals__", {})

    def found(text: str) -> Any:
        first, *rest = text.split(".")
        return functools.reduce(lambda value, name: getattr(value, name, None), rest, scope.get(first))

    modules = ("torch", "F", "nn.functional", "torch.nn.functional")
    return frozenset(text for module in modules if found(text := f"{module}.{name}") in wanted)


def sigmoids_in(function: Any) -> frozenset[str]:
    return names_of_function(function, "sigmoid", torch.sigmoid, nn.functional.sigmoid)


def only_argument(node: ast.AST) -> ast.expr | None:
    """Of a call."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return None if isinstance(node.args[0], ast.Starred) else node.args[0]
    return None


def sigmoid_of(node: ast.expr, sigmoids: frozenset[str]) -> ast.expr | None:
    """g if the node is ``sigmoid(g)``, g.unsqueeze(-1) if it is ``sigmoid(g).unsqueeze(-1)``."""
    argument = only_argument(node)
    if argument is None or not isinstance(node, ast.Call):
        return None
    if ast.unparse(node.func) in sigmoids:
        return argument
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "unsqueeze" or ast.unparse(argument) != "-1":
        return None
    inner = node.func.value
    g = only_argument(inner)
    if g is None or not isinstance(inner, ast.Call) or ast.unparse(inner.func) not in sigmoids:
        return None
    return ast.Call(ast.Attribute(g, "unsqueeze", ast.Load()), [argument], [])


def fuse_gates(block: list[ast.stmt], sigmoids: frozenset[str], function: ast.FunctionDef) -> bool:
    """Merges the product of a name and a sigmoid."""
    for statement in block:
        for node in ast.walk(statement):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
                continue
            for x, other in ((node.left, node.right), (node.right, node.left)):
                g = sigmoid_of(other, sigmoids)
                # Without assignments inside of it, the order of evaluation does not matter.
                if g is None or not isinstance(x, ast.Name) or any(isinstance(n, ast.NamedExpr) for n in ast.walk(g)):
                    continue
                replace_node(block, node, ast.Call(ast.Name(GATE, ast.Load()), [x, g], []))
                return True
    return False


def is_read_later(name: str, statements: list[ast.stmt], function: ast.FunctionDef) -> bool:
    """Whether the statements, or functions within the function, may read the name."""
    inner = [node for node in ast.walk(function) if isinstance(node, LATER) and node is not function]
    return any(is_name(node, name) for below in (*statements, *inner) for node in ast.walk(below))


def fuse_gated_additions(block: list[ast.stmt], _: frozenset[str], function: ast.FunctionDef) -> bool:
    """Merges ``y = liger_gate(x, g); h = h + y`` into one statement, if y is not read again."""
    # In a loop, the name may be read in the next turn.
    if block is not function.body:
        return False
    for i in range(len(block) - 1):
        gated, total = map(simple_assignment, block[i : i + 2])
        if gated is None or total is None:
            continue
        (y, call), (h, summed) = gated, total
        if not (isinstance(call, ast.Call) and is_name(call.func, GATE) and len(call.args) == 2):
            continue
        if not (isinstance(summed, ast.BinOp) and isinstance(summed.op, ast.Add)):
            continue
        sides = {side.id for side in (summed.left, summed.right) if isinstance(side, ast.Name)}
        if y == h or sides != {y, h} or is_read_later(y, block[i + 2 :], function):
            continue
        merged = ast.Call(call.func, [*call.args, ast.Name(h, ast.Load())], [])
        block[i : i + 2] = [ast.copy_location(ast.Assign([ast.Name(h, ast.Store())], merged), block[i + 1])]
        return True
    return False


def with_gated_additions(function: Any) -> types.CodeType | None:
    """The function's code with gates merged into the additions that follow, or None if it has none."""
    # Check the names first: reading the source takes longer.
    if "sigmoid" not in names_in(function.__code__):
        return None
    found = rewritten(function, (fuse_gates, sigmoids_in(function)), (fuse_gated_additions, frozenset()))
    return found.code if found and found.applied[1] else None


def only_added(name: str, function: ast.FunctionDef) -> bool:
    """Whether the function reads a name only as an operand of ``+``: nothing writes to its tensor or inspects it."""
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


def find_definition(code: types.CodeType, module: ast.Module) -> ast.FunctionDef | None:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            if code.co_firstlineno == min([node.lineno, *(d.lineno for d in node.decorator_list)]):
                return node
    return None


def find_code(module: types.CodeType, like: types.CodeType) -> types.CodeType | None:
    for constant in module.co_consts:
        if isinstance(constant, types.CodeType):
            if (constant.co_name, constant.co_firstlineno) == (like.co_name, like.co_firstlineno):
                return constant
            if (found := find_code(constant, like)) is not None:
                return found
    return None


Change = Callable[[list[ast.stmt], frozenset[str], ast.FunctionDef], bool]


def change_all(change: Change, function: ast.FunctionDef, children: frozenset[str]) -> bool:
    found = False
    for block in list(blocks_of(function)):
        while change(block, children, function):
            found = True
    return found


class Rewritten(NamedTuple):
    code: types.CodeType
    applied: tuple[bool, ...]  # for each change, whether it found something


def parsed(function: types.FunctionType) -> tuple[ast.Module, ast.FunctionDef] | None:
    """The tree of the function's module and the function's node, if its source is what it runs."""
    try:
        code = function.__code__
        source = "".join(inspect.findsource(function)[0])
        module = ast.parse(source)
        plain = find_code(compile(source, code.co_filename, "exec", dont_inherit=True), code)
    except (AttributeError, OSError, SyntaxError):
        return None
    definition = find_definition(code, module)
    if plain is None or definition is None or plain.co_code != code.co_code:
        return None
    return module, definition


@functools.lru_cache(None)
def rewritten(function: types.FunctionType, *changes: tuple[Change, frozenset[str]]) -> Rewritten | None:
    """The function's code after the changes, each with the names that it takes, or None if no change applies."""
    found = parsed(function)
    if found is None:
        return None
    module, definition = found
    applied = tuple(change_all(change, definition, names) for change, names in changes)
    if not any(applied):
        return None
    # Compile the whole module again: CPython calls a name differently if the module imports it.
    compiled = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec", dont_inherit=True)
    code = find_code(compiled, function.__code__)
    return None if code is None else Rewritten(code, applied)


def with_fused_norms(function: types.FunctionType, norms: frozenset[str]) -> types.CodeType | None:
    """The function's code with residual additions merged into the calls of these norms, or None if it has none."""
    found = rewritten(function, (fuse_add_norm, norms), (fuse_norm_and_input, norms))
    return found.code if found and found.applied[0] else None


def projections_of(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, child in module.named_children() if is_projection(child))


# ---- Copies of functions with other globals


def rebound(function: Any, replaced: dict[str, Callable], code: types.CodeType | None = None) -> Any:
    """A copy of a function and its decorators, with `replaced` among its globals and, if given, `code` as its code.

    The copy's globals hold only the names that its code uses. They must not hold the module's __name__, because
    torch.compile would then read the globals from the module.
    """
    cells = function.__closure__
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        inner, code = rebound(wrapped, replaced, code), function.__code__
        cells = tuple(types.CellType(inner) if cell.cell_contents is wrapped else cell for cell in cells or ())
        scope = function.__globals__
    else:
        names, code = function.__globals__, code or function.__code__
        scope = {n: names[n] for n in names_in(code) if n in names} | replaced | {"__builtins__": builtins}
    bound: Any = types.FunctionType(code, scope, function.__name__, function.__defaults__, cells)
    bound.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(bound, function)
    if wrapped is None:
        del bound.__wrapped__
    else:
        bound.__wrapped__ = inner
    return bound


def rebinding_key(function: Any) -> tuple:
    """A cache key: the function and the identity of the globals that it uses, which may change between patches."""
    inner = inner_function(function)
    names = inner.__globals__
    return function, *(id(names[name]) for name in sorted(names_in(inner.__code__)) if name in names)


def names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names
