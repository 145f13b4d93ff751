"""Wrong calls of every operator, derived from its schema, its documentation and a right call: one argument at a time is
changed into what the declaration does not allow. A new operator gets its wrong calls for free.

The calls run in other processes, so that a crash is an outcome like any other.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from liger_ops.reference import operators
from liger_ops.reference._documentation import Described, documentation
from tests.support.host.fork_server import Fork
from tests.support.host.solo_group import SOLO, solo_group
from tests.support.operator_calls import (
    OPERATORS,
    PUBLIC,
    arguments_of,
    backward,
    is_differentiable,
    product_calls,
    public_call,
    public_calls,
)

Arguments = dict[str, Any]
HUGE = "huge, on the meta device"
LEAST, MOST, FAR = -(1 << 63), (1 << 63) - 1, 10_000
NUMBERS = ("x", "bcx", "initial_state")


class Wrong(NamedTuple):
    op: str
    argument: str  # which the message must name
    what: str
    arguments: Callable[[], Arguments]  # made in the process that needs them


# ---- Right calls


def in_one_sample(call: Arguments) -> Arguments:
    given = {name: t[:1] if name in NUMBERS else t for name, t in call.items()}
    return given | dict(seq_idx=None, cu_seqlens=torch.tensor([0, 1, 4]))


def by_section(call: Arguments) -> Arguments:
    angles = {name: call[name].expand(3, -1, -1, -1) for name in ("cos", "sin")}
    return call | angles | dict(mrope_section=[1, 1, 2])


def split(call: Arguments) -> Arguments:
    """Over a group of one rank."""
    classes = call["logits"].shape[-1] if "logits" in call else call.get("s_weight", call.get("weight")).shape[0]
    if "vocab_map" in call:
        teacher = {name: t[:classes] for name, t in call.items() if re.fullmatch("t_(weight|bias)", name)}
        call = call | teacher | dict(vocab_map=None)
    call = {name: None if "low_rank" in name else t for name, t in call.items()}
    return call | dict(group=SOLO, classes=classes)


# Right calls in which an argument has a value, made from one in which it has none.
WITH: dict[str, Callable[[Arguments], Arguments]] = {
    "cu_seqlens": in_one_sample,
    "mrope_section": by_section,
    "experts": lambda call: call | dict(bias=None, experts=torch.tensor([[0, 1]] * 4)),
    "group": split,
    "classes": split,
    "class_sizes": lambda call: (given := split(call)) | dict(class_sizes=[given["classes"]]),
    "sequence_dim": lambda call: split(call) | dict(sequence_dim=0),
}


def operators_to_call() -> list[str]:
    """The public operators, and the private ones that Python calls with lists of its own."""
    lists = {op for op in OPERATORS if any(str(a.type) in ("List[int]", "List[float]") for a in arguments_of(op))}
    return sorted([*public_calls(), *(op for op in product_calls() if op in lists and "_bwd" not in op)])


def right_call(op: str, argument: str) -> Arguments:
    """In which the argument has a value, if it is a tensor or a list."""
    torch.manual_seed(0)
    call = public_call(op) if op in operators() else product_calls()[op]
    return WITH[argument](call) if argument in WITH else call


# ---- What the documentation says


@cache
def described(op: str) -> dict[str, Described]:
    operator = operators().get(op)
    if operator is None:
        return {}
    return documentation(operator).tensors | (documentation(operator.base).tensors if operator.base else {})


@cache
def sentences(op: str) -> list[str]:
    """Also those of operators whose options it has."""
    operator = operators().get(op)
    if operator is None:
        return []
    own = documentation(operator)
    found = [s for text in own.text for s in text.split(". ")]
    about_options = [s for s in found if "options are those" in s]
    words = re.findall(r"\w+", " ".join([own.summary, *about_options])) if about_options else []
    others = {operator.base.__name__} if operator.base else set(words) & set(operators()) - {op}
    return found + [s for name in others for s in sentences(name)]


def says(op: str, argument: str, rule: str) -> bool:
    """Whether a sentence about the argument has these words."""
    names = rf"\b({argument}|{argument.rpartition('_')[2]}s)\b"  # "the softcaps" are s_softcap and t_softcap
    return any(re.search(rule, s) and re.search(names, s) for s in sentences(op))


def dimensions(shapes: str) -> list[str]:
    """Of a shape without alternatives: as letters and factors."""
    return [] if shapes == "()" else shapes.strip("()").rstrip(",").split(", ")


# ---- Wrong tensors


def replaced(call: Arguments, argument: str, i: int | None, change: Callable[[Tensor], Any]) -> Arguments:
    if i is None:
        return call | {argument: change(call[argument])}
    return call | {argument: [change(t) if i == j else t for j, t in enumerate(call[argument])]}


def longer(t: Tensor, dim: int) -> Tensor:
    return torch.cat([t, t.narrow(dim, 0, 1)], dim)


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def with_number(t: Tensor, value: int) -> Tensor:
    t = t.clone()
    t.view(-1)[0] = value
    return t


def of_tensor(op: str, argument: str, call: Arguments, t: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """What is wrong with it, and how to make it so."""
    if argument in WITH:  # test_memory.py frees the others
        yield "freed", freed
    shapes = {name: d for name, d in described(op).items() if call.get(name) is not None}
    if argument not in shapes:
        return  # of a private operator
    mine, others = shapes[argument], [d for name, d in shapes.items() if name != argument]
    yield "a string", lambda t: "x"
    yield "sparse", lambda t: t.to_sparse()
    if others:
        yield "on another device", lambda t: t.to("meta")
    for dtype in wrong_dtypes(mine, others):
        yield f"of {dtype}", lambda t, dtype=dtype: t.to(dtype)
    if mine.is_of("indices"):
        for value in wrong_indices(op, argument):
            yield f"with {value}", lambda t, value=value: with_number(t, value)
        yield from WRONG_INDICES.get(argument, {}).items()
    # One number may have any shape.
    if " or " in mine.shapes or mine.shapes == "(1,)":
        return
    leading = any("..." in d.shapes for d in others)
    if "..." not in mine.shapes or leading:
        yield "with one more dimension", lambda t: t.unsqueeze(0)
    if mine.shapes != "(...)" or leading:
        yield "a scalar", lambda t: torch.zeros((), dtype=t.dtype)
    known = {letter for d in others for letter in LETTER.findall(d.shapes)}
    for dim, written in enumerate(reversed(dimensions(mine.shapes)), start=1):
        # Another tensor has this size, or there is a number in it.
        if dim <= t.dim() and (known & set(LETTER.findall(written)) or re.match(r"\d", written)):
            yield f"with a longer dimension {-dim}", lambda t, dim=dim: longer(t, -dim)


LETTER = re.compile(r"\.\.\.|[A-Z][a-z]?|[a-z]")


def wrong_dtypes(mine: Described, others: list[Described]) -> list[torch.dtype]:
    """Tensors of a call have the same dtype unless a note says otherwise."""
    if mine.is_of("indices"):
        return [torch.float32, torch.int16, torch.bool]
    if mine.is_of("bool"):
        return [torch.float32, torch.int64]
    if mine.is_of("complex"):
        return [torch.float32]
    found = [torch.int64, torch.complex64]
    if "any floating" in mine.note:
        return found
    same = [d for d in others if not d.note.startswith("in ") and not any(map(d.is_of, ("indices", "bool", "complex")))]
    return found + [torch.float64] * (bool(same) or mine.note.startswith("in "))


def wrong_indices(op: str, argument: str) -> Sequence[int]:
    """Numbers out of range."""
    is_compared = argument in ("seq_idx", "shift_labels")  # with others, or with ignore_index: there is no range
    is_dropped = any("are dropped" in text for text in documentation(operators()[op]).text)
    return () if is_compared or is_dropped else (-1, FAR, LEAST, MOST)


def ends(*numbers: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.tensor(numbers, dtype=t.dtype)


# More of an argument whose numbers depend on each other.
WRONG_INDICES: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "cu_seqlens": {
        "descending": ends(0, 3, 1, 4),
        "not from 0": ends(1, 4),
        "not to the last row": ends(0, 3),
        "beyond the last row": ends(0, 5),
        "of lengths": ends(2, 2),
        "negative": ends(0, -1, 4),
        "empty": ends(),
    },
    "tokens_per_expert": {
        "with a sum that wraps": lambda t: torch.full_like(t, MOST),
        "with a sum that wraps to 0": lambda t: torch.full_like(t, LEAST),
        "with more than all rows": lambda t: t + 4,
    },
}


def enlarge(call: Arguments) -> Arguments:
    """On the meta device: as many rows, columns and classes as torch can describe in each tensor alone."""
    tensors = [t for t in tree_leaves(call) if isinstance(t, Tensor)]
    most = max(t.numel() for t in tensors).bit_length()
    dims = max(sum(n > 3 for n in t.shape) for t in tensors)
    factor = 1 << (62 - most) // dims

    def enlarged(t: Tensor) -> Tensor:
        # Small numbers are those of experts, ranks and the weights of a convolution.
        return torch.empty((), dtype=t.dtype, device="meta").expand([n * factor if n > 3 else n for n in t.shape])

    return tree_map_only(Tensor, enlarged, call)


# ---- Wrong lists and options


def of_list(values: list[Any], note: str) -> Iterator[tuple[str, list[Any]]]:
    if "empty list" not in note:
        yield "empty", []
    yield "too long", [*values, values[-1]]
    if len(values) > 1:
        yield "too short", values[:-1]
    for i, value in enumerate(values):
        wrong: dict[type, list] = {int: [-1, FAR, MOST, LEAST], float: [math.nan, math.inf, -math.inf]}
        for w in wrong.get(type(value), []):
            yield f"[{i}] = {w}", [*values[:i], w, *values[i + 1 :]]
    if values and isinstance(values[0], int):
        yield f"all {MOST}", [MOST] * len(values)
        yield "of the right sum, with a negative one", [MOST, *values[1:-1], sum(values) - MOST - sum(values[1:-1])]


def of_option(op: str, argument: str, kind: str, may_be_none: bool) -> Iterator[tuple[str, Any]]:
    if kind == "str":
        yield "unknown", "unknown"
        yield "empty", "" if argument != "group" else "\0"
        yield "a number", 3
    if kind == "bool":
        yield "a string", "yes"
    if kind == "float":
        yield "a string", "1.0"
        # One that may be None is a bound, which may be infinite.
        yield from ((str(value), value) for value in (math.nan, *(() if may_be_none else (math.inf, -math.inf))))
        if says(op, argument, r"\bpositive\b"):
            yield from ((str(value), value) for value in (0.0, -1.0))
        if says(op, argument, "not negative"):
            yield "-1.0", -1.0
        if says(op, argument, r"lies in \[0, 1\]"):
            yield from ((str(value), value) for value in (-0.5, 1.5))
    if kind == "int" and argument != "ignore_index":  # any number may mark rows that do not count
        yield "a string", "1"
        yield str(LEAST), LEAST
        # As much memory, or as many steps, as one likes.
        yield from [(str(MOST), MOST)] * (argument not in ("memory_budget", "sinkhorn"))
        # Of these, 0 is a row or a dimension, and -1 the last dimension; `classes` is 0 without a group.
        if argument not in ("padding_idx", "sequence_dim", "classes"):
            yield from ((str(value), value) for value in (0, -1))


# ---- All of them


@cache
def wrong_calls(op: str) -> list[Wrong]:
    found = []

    def add(argument: str, what: str, change: Callable[[Arguments], Arguments]) -> None:
        found.append(Wrong(op, argument, what, lambda: change(right_call(op, argument))))

    for a in arguments_of(op):
        name, kind = a.name, re.sub(r"Optional\[(.*)\]", r"\1", str(a.type))
        call = right_call(op, name)
        value = call.get(name)
        if isinstance(value, Tensor):
            for what, change in of_tensor(op, name, call, value):
                add(name, what, lambda call, n=name, c=change: replaced(call, n, None, c))
        elif kind == "Tensor" or kind.startswith("List"):
            if value is None and op.startswith("_"):
                continue
            assert value, f"{op}: give {name} a value, in operator_calls.py or in WITH of wrong_calls.py"
            note = described(op)[name].note if name in described(op) else ""
            for what, _ in of_list(value, note):
                add(name, what, lambda call, n=name, w=what, note=note: call | {n: dict(of_list(call[n], note))[w]})
            if op in PUBLIC:
                add(name, "a number", lambda call, n=name: call | {n: 3})
            for what, change in of_tensor(op, name, call, value[0]) if isinstance(value[0], Tensor) else ():
                add(name, f"[0] {what}", lambda call, n=name, c=change: replaced(call, n, 0, c))
        else:
            for what, value in of_option(op, name, kind, kind != str(a.type)):
                add(name, what, lambda call, n=name, v=value: call | {n: v})
    if op in PUBLIC:
        add("", HUGE, enlarge)
    return found


# ---- Running them


def attempt(wrong: Wrong, learns: bool) -> str:
    """What happens: the message, or that it passes. learns: with a graph, and backward."""
    arguments = wrong.arguments()
    solo_group()
    for name, value in arguments.items():
        for t in value if isinstance(value, list) else [value]:
            if learns and is_differentiable(wrong.op, name, t) and t.is_leaf:
                t.requires_grad_()
    function = operators().get(wrong.op) or getattr(torch.ops.liger, wrong.op)
    step = "forward"
    try:
        out = function(**arguments)
        step = "backward"
        if learns:
            backward(tuple(out) if isinstance(out, tuple) else out)
    except Exception as error:
        return ("" if step == "forward" else "FORWARD PASSES, BACKWARD: ") + f"{error}".partition("\n")[0]
    return "PASSES"


def run_from(first: int, wrong: list[Wrong], out: TextIO) -> None:
    """In a process of its own: a call, and those after it as long as all are refused, which leaves nothing behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    for i, call in enumerate(wrong[first:], start=first):
        signal.alarm(20)
        for learns in (False, True) if not call.op.endswith("_") else (False,):
            out.write(f"{json.dumps([i, None])}\n")
            out.flush()
            message = attempt(call, learns)
            out.write(f"{json.dumps([i, message])}\n")
            out.flush()
            if "PASSES" in message:
                return


def serve(channel: Any, op: str) -> None:
    """Writes what happened in each of an operator's wrong calls."""
    wrong = wrong_calls(op)
    messages: list[list[str]] = [[] for _ in wrong]
    i = 0
    while i < len(wrong):
        with tempfile.TemporaryFile("w+") as out:
            pid = os.fork()
            if not pid:
                with suppress(BaseException):
                    run_from(i, wrong, out)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out.seek(0)
            for line in out:
                i, message = json.loads(line)
                messages[i] += [] if message is None else [message]
        if status:
            messages[i].append(f"CRASHES: {signal.Signals(-status).name}")
        i += 1
    channel.write(json.dumps(messages) + "\n")
    channel.flush()


def outcomes(op: str) -> list[list[str]]:
    """Of each of an operator's wrong calls: what happens without and with a graph."""
    # The first backward of a process would import the second module.
    modules = ["tests.support.wrong_calls", "torch.fx.experimental.symbolic_shapes"]
    fork = Fork(
        f"from tests.support import wrong_calls; wrong_calls.serve(channel, {op!r})", sys.stdout, sys.stderr, modules
    )
    try:
        return fork.receive(time.monotonic() + 600)
    finally:
        fork.close()


def complaint(wrong: Wrong, messages: list[str]) -> str | None:
    """Why this is not what a wrong call must do."""
    if not messages:
        return "nothing ran"
    if wrong.what == HUGE:  # may pass, since nothing is computed, and torch refuses results that it cannot describe
        return next((message for message in messages if message.startswith("CRASHES")), None)
    family = re.sub("(_with_.*|_)$", "", wrong.op)  # variants share their code
    family = "_?" if wrong.op.startswith("_") else family  # its caller may have a name of its own
    # Where two arguments clash, the message may be about the other one.
    clashes = re.search("long|short|empty|device|dimension|float64", wrong.what) or wrong.argument == "classes"
    names = "|".join(a.name for a in arguments_of(wrong.op)) if clashes else wrong.argument
    rule = re.compile(rf"{family}\w*( backward)?: .*\b({names})\b")
    return next((message for message in messages if not rule.match(message)), None)
