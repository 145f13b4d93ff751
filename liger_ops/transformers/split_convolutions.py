"""The statements around the convolution of a delta net, which prepare one tensor for it and split its result:

    mixed = torch.cat((query, key, value), dim=-1).transpose(1, 2)
    if conv_state is not None ...:
        mixed = causal_conv1d_update(mixed, ...)
    else:
        ...
        mixed = causal_conv1d_fn(mixed, ...)
    query, key, value = torch.split(mixed.transpose(1, 2), [...], dim=-1)

Without a cache, `causal_conv1d_split` makes query, key and value, which are contiguous then:

    mixed = torch.cat((query, key, value), dim=-1)
    liger_parts = liger_split_causal_conv1d_fn([...], mixed, ...) if cache is None and not ... else None
    if liger_parts is not None:
        query, key, value = liger_parts
    else:
        mixed = mixed.transpose(1, 2)
        ...

If a method of the module takes query, key and value out of a projection whose columns alternate by heads, before they are
concatenated, the call reads the projection instead. Running the method on numbers shows the order of the columns.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import probe, rewrite
from .patched import inner_function

OPERATOR = "causal_conv1d_split"
SPLIT, SPLIT_ROWS, PARTS = "liger_split_", "liger_split_rows_", "liger_parts"


class Layout(NamedTuple):
    """How a method splits the columns of a projection."""

    method: str
    sizes: tuple[int, ...]  # of q, k, v and z in a group
    groups: int
    gate: int  # z's position among the results
    heads: tuple[int, int]  # of z: number and columns


# ---- The statements


def transposed(node: ast.AST, axes: str = "1, 2") -> ast.expr | None:
    """x if the node is ``x.transpose(1, 2)``, or of other axes."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "transpose":
        if ", ".join(map(ast.unparse, node.args)) == axes and not node.keywords:
            return node.func.value
    return None


def mentions(node: ast.AST, name: str) -> bool:
    return any(rewrite.is_name(n, name) for n in ast.walk(node))


def is_not_none(node: ast.AST) -> str:
    """n if the node is ``n is not None``, or ""."""
    plain = isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and isinstance(node.ops[0], ast.IsNot)
    if plain and len(node.ops) == 1 and ast.unparse(node.comparators[0]) == "None":  # type: ignore[attr-defined]
        return node.left.id  # type: ignore[attr-defined]
    return ""


class Convolved(NamedTuple):
    call: ast.Call
    conditions: list[str]  # with which the statement only runs the call


def convolved(statement: ast.stmt, mixed: str, functions: frozenset[str]) -> Convolved | None:
    """If the statement convolves `mixed` in one branch, alone if no cache is given."""
    if not isinstance(statement, ast.If) or len(statement.body) != 1:
        return None
    if (rewrite.simple_assignment(statement.body[0]) or ("",))[0] != mixed:
        return None
    call, conditions = None, []
    for inner in statement.orelse:
        cache = is_not_none(inner.test) if isinstance(inner, ast.If) and not inner.orelse else ""
        name, value = rewrite.simple_assignment(inner) or ("", None)
        if cache:
            conditions.append(f"{cache} is None")
        elif name != mixed:
            return None
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in functions:
            if call is not None or not value.args or not rewrite.is_name(value.args[0], mixed):
                return None
            call = value
        elif call is not None and isinstance(value, ast.Subscript):
            # Drops rows of a cache.
            end = ast.unparse(value).removeprefix(f"{mixed}[:, :, -").removesuffix(":]")
            if not end.isidentifier():
                return None
            conditions.append(f"{mixed}.shape[1] == {end}")
        else:
            return None
    if call is None or not any(condition.endswith(" is None") for condition in conditions):
        return None
    # A second time `mixed` would be another tensor.
    if any(mentions(a, mixed) for a in (*call.args[1:], *(k.value for k in call.keywords), statement.test)):
        return None
    return Convolved(call, [*dict.fromkeys(conditions), f"not ({ast.unparse(statement.test)})"])


def split_of(statement: ast.stmt, splits: frozenset[str]) -> tuple[list[str], ast.expr, ast.expr] | None:
    """(names, x, sizes) if the statement is ``a, b, c = torch.split(x, sizes, dim=-1)``."""
    if (
        not isinstance(statement, ast.Assign)
        or len(statement.targets) != 1
        or not isinstance(statement.value, ast.Call)
    ):
        return None
    targets, call = statement.targets[0], statement.value
    names = names_in_tuple(targets)
    options = [(k.arg, ast.unparse(k.value)) for k in call.keywords]
    if len(names) != 3 or ast.unparse(call.func) not in splits or len(call.args) != 2 or options != [("dim", "-1")]:
        return None
    return names, call.args[0], call.args[1]


def names_in_tuple(node: ast.AST) -> list[str]:
    """The different names of a tuple of names, or none."""
    names = [n.id for n in node.elts if isinstance(n, ast.Name)] if isinstance(node, ast.Tuple) else []
    return names if isinstance(node, ast.Tuple) and len(set(names)) == len(node.elts) else []


class Reordering(NamedTuple):
    statements: list[ast.stmt]
    method: str
    arguments: list[ast.expr]
    results: list[str]


def reordering_of(block: list[ast.stmt], mixed: str, end: int, cats: frozenset[str]) -> Reordering | None:
    """The statements before `end` that make `mixed` of the first results of a method."""
    if end < 3:
        return None
    made, flat, joined = block[end - 3 : end]
    name, value = rewrite.simple_assignment(joined) or ("", None)
    if name != mixed or not isinstance(value, ast.Call) or ast.unparse(value.func) not in cats:
        return None
    parts = names_in_tuple(value.args[0]) if len(value.args) == 1 else []
    if len(parts) != 3 or [(k.arg, ast.unparse(k.value)) for k in value.keywords] != [("dim", "-1")]:
        return None
    if not isinstance(flat, ast.Assign) or names_in_tuple(flat.targets[0]) != parts:
        return None
    if ast.unparse(flat.value) != f"(x.reshape(x.shape[0], x.shape[1], -1) for x in ({', '.join(parts)}))":
        return None
    if not isinstance(made, ast.Assign) or not isinstance(made.value, ast.Call) or made.value.keywords:
        return None
    results, call = names_in_tuple(made.targets[0]), made.value
    if results[:3] != parts or not isinstance(call.func, ast.Attribute) or not rewrite.is_name(call.func.value, "self"):
        return None
    if not call.args or not all(isinstance(a, ast.Name) for a in call.args):
        return None
    return Reordering([made, flat, joined], call.func.attr, call.args, results)


class Names(NamedTuple):
    """What the statements may call."""

    functions: frozenset[str]  # convolutions
    methods: frozenset[str]  # with a layout
    splits: frozenset[str]
    cats: frozenset[str]


class Found(NamedTuple):
    first: int  # of the statement that transposes
    last: int  # of the one that splits
    mixed: str
    before: ast.expr | None  # what is transposed, if it is not `mixed`
    convolution: Convolved
    targets: list[str]
    sizes: ast.expr


def regions(block: list[ast.stmt], names: Names) -> Iterator[Found]:
    for first, statement in enumerate(block):
        mixed, value = rewrite.simple_assignment(statement) or ("", statement)
        before = transposed(value)
        if before is None:
            continue
        for i in range(first + 1, len(block) - 1):
            if not mentions(block[i], mixed):
                continue
            convolution = convolved(block[i], mixed, names.functions)
            last, rows = i + 1, f"{mixed}.transpose(1, 2)"
            if ast.unparse(block[last]) == f"{mixed} = {rows}":
                last, rows = last + 1, mixed
            split = split_of(block[last], names.splits) if last < len(block) else None
            if convolution is not None and split is not None and ast.unparse(split[1]) == rows:
                inner = None if rewrite.is_name(before, mixed) else before
                yield Found(first, last, mixed, inner, convolution, split[0], split[2])
            break


def fuse_split(block: list[ast.stmt], given: frozenset[tuple[str, frozenset[str]]], function: ast.FunctionDef) -> bool:
    names = Names(**dict(given))
    if block is not function.body:
        return False
    for found in regions(block, names):
        mixed, call, place = found.mixed, found.convolution.call, block[found.first]
        if rewrite.is_read_later(mixed, block[found.last + 1 :], function):
            continue
        function_name = call.func.id  # type: ignore[attr-defined]
        reordering = reordering_of(block, mixed, found.first, names.cats) if found.before is None else None
        if reordering is not None and {*reordering.results[:3]} != {*found.targets}:
            reordering = None
        if reordering is not None and reordering.method not in names.methods:
            reordering = None
        middle = [s for s in block[found.first + 1 : found.last] if not mentions(s, mixed)]
        convolving = [s for s in block[found.first + 1 : found.last + 1] if s not in middle]
        if reordering is None:
            first, targets, width = found.first, found.targets, mixed
            helper, arguments = SPLIT + function_name, [found.sizes, call.args[0]]
        else:
            first, width = found.first - 3, ast.unparse(reordering.arguments[0])
            targets = [*found.targets, *reordering.results[3:]]
            helper = SPLIT_ROWS + function_name
            rows = ast.Tuple([*reordering.arguments], ast.Load())
            arguments = [found.sizes, ast.Name("self", ast.Load()), ast.Constant(reordering.method), rows]
            # The statements between would read names that the reordering assigns.
            if any(mentions(s, name) for s in middle for name in (*reordering.results, width)):
                continue
        conditions = [c.replace(f"{mixed}.shape", f"{width}.shape") for c in found.convolution.conditions]
        fused = ast.Call(ast.Name(helper, ast.Load()), [*arguments, *call.args[1:]], call.keywords)
        test = rewrite.expression(" and ".join(conditions))
        attempt = ast.Assign([ast.Name(PARTS, ast.Store())], ast.IfExp(test, fused, ast.Constant(None)))
        turn = ast.Assign([ast.Name(mixed, ast.Store())], rewrite.expression(f"{mixed}.transpose(1, 2)"))
        original = [*(reordering.statements if reordering else []), turn, *convolving]
        chosen = rewrite.assignment(targets, ast.Name(PARTS, ast.Load()), place)
        branch = ast.If(rewrite.expression(f"{PARTS} is not None"), [chosen], copy.deepcopy(original))
        made = [] if found.before is None else [ast.Assign([ast.Name(mixed, ast.Store())], found.before)]
        block[first : found.last + 1] = [
            ast.copy_location(s, place) for s in (*made, *middle, attempt, branch)
        ]  # fmt: skip
        return True
    return False


def with_split(function: Any, functions: frozenset[str], methods: frozenset[str]) -> tuple[Any, Any] | None:
    """The change for rewrite.rewritten, or None if the function has no such statements."""
    inner = inner_function(function)
    if not hasattr(inner, "__code__") or not {"split", "transpose"} <= rewrite.names_in(inner.__code__):
        return None
    splits, cats = (rewrite.names_of_function(inner, n, getattr(torch, n)) for n in ("split", "cat"))
    given = Names(functions, methods, splits, cats)._asdict().items()
    return (fuse_split, frozenset(given))


# ---- The order of a projection's columns


def reordering_methods(function: Any) -> set[str]:
    """The methods that the function calls on itself with more than one result."""
    found = rewrite.parsed(inner_function(function))
    calls = (
        [n.value for n in ast.walk(found[1]) if isinstance(n, ast.Assign) and names_in_tuple(n.targets[0])]
        if found
        else []
    )
    return {
        call.func.attr
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and rewrite.is_name(call.func.value, "self")
    }


def arguments_of_method(function: Any, method: str) -> list[str]:
    """The children whose results the method gets in the function, in their order, or none."""
    found = rewrite.parsed(inner_function(function))
    block = found[1].body if found else []
    made = {}
    for statement in block:
        name, value = rewrite.simple_assignment(statement) or ("", statement)
        if child := rewrite.child_called(value):
            made[name] = child[0]
        call = getattr(statement, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == f"self.{method}":
            children = [made.get(ast.unparse(a), "") for a in call.args]
            return children if all(children) else []
    return []


@torch.no_grad()
def layout_of(module: nn.Module, function: Any, method: str) -> Layout | None:
    """What the method does with the columns of its first argument: q, k and v are the first results, z a later one."""
    widths = [
        getattr(getattr(module, child, None), "out_features", 0) for child in arguments_of_method(function, method)
    ]
    if not widths or not all(isinstance(width, int) and width > 0 for width in widths):
        return None
    starts = [sum(widths[:i]) for i in range(len(widths))]
    numbers = [torch.arange(s, s + w, device="cpu", dtype=torch.float64).view(1, 1, -1) for s, w in zip(starts, widths)]
    columns = widths[0]
    run = getattr(probe.shallow_copy(module), method)
    results = probe.try_call(run, *numbers)
    if results is None or len(results) < 4 or not all(isinstance(t, Tensor) for t in results):
        return None
    orders = [t.flatten().long() for t in results]
    gates = [i for i, t in enumerate(orders) if i >= 3 and t.numel() and int(t.max()) < columns]
    if len(gates) != 1 or any(t.shape[:2] != (1, 1) for t in results) or results[gates[0]].dim() != 4:
        return None
    (gate,) = gates
    parts = [*orders[:3], orders[gate]]
    groups = next((g for g in range(1, columns + 1) if alternate(parts, columns, g)), 0)
    if not groups:
        return None
    # The other results do not depend on the first argument.
    several = [numbers[0], *(t.expand(2, 3, -1) for t in numbers[1:])]
    others = probe.try_call(run, *several)
    if others is None:
        return None
    for i, (few, many) in enumerate(zip(results, others)):
        if i >= 3 and i != gate and not torch.equal(many, few.expand(2, 3, *few.shape[2:])):
            return None
    sizes = tuple(len(t) // groups for t in parts)
    return Layout(method, sizes, groups, gate, tuple(results[gate].shape[2:]))


def alternate(parts: list[Tensor], columns: int, groups: int) -> bool:
    if columns % groups or any(len(t) % groups for t in parts) or sum(map(len, parts)) != columns:
        return False
    numbers = torch.arange(columns, device="cpu").view(groups, -1).split([len(t) // groups for t in parts], 1)
    return all(torch.equal(a.flatten(), b) for a, b in zip(numbers, parts))


def layouts_of(module: nn.Module, function: Any) -> tuple[Layout, ...]:
    found = (layout_of(module, function, method) for method in sorted(reordering_methods(function)))
    return tuple(layout for layout in found if layout is not None)


# ---- The functions that rewritten methods call


def split_rows_function(split: Any, layouts: tuple[Layout, ...]) -> Any:
    """Splits a projection whose columns alternate: q, k, v and the method's other results, or None."""
    by_method = {layout.method: layout for layout in layouts}

    def split_rows(sizes: Any, module: Any, method: str, tensors: Any, *args: Any, **named: Any) -> Any:
        layout = by_method[method]
        x, *others = tensors
        if [*sizes] != [layout.groups * size for size in layout.sizes[:3]]:
            return None
        parts = split([*layout.sizes], x, *args, groups=layout.groups, **named)
        if parts is None:
            return None
        *parts, z = parts
        # The results that do not depend on x.
        rest = [*getattr(module, method)(x.detach()[:1, :1], *others)[3:]]
        rest[layout.gate - 3] = z.reshape(*x.shape[:2], *layout.heads)
        return *parts, *rest

    return split_rows
