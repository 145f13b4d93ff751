"""Wrong calls of every operator, derived from its schema, its documentation and a right call: one argument at a time is
changed into what the declaration does not allow. A new operator gets its wrong calls for free.

Each call runs in a process of its own, so that a crash is an outcome like any other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from fork_server import Fork
from operator_calls import (
    OPERATORS,
    PUBLIC,
    arguments_of,
    backward,
    is_differentiable,
    numbers,
    product_calls,
    public_calls,
)
from solo_group import SOLO, solo_group
from torch import Tensor

from liger_ops.reference import operators
from liger_ops.reference._documentation import Described, documentation

Arguments = dict[str, Any]
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
    angles = {name: call[name].expand(3, 1, -1, -1) for name in ("cos", "sin")}
    return call | angles | dict(mrope_section=[1, 1, 2])


def split(call: Arguments) -> Arguments:
    """Over a group of one rank."""
    classes = call["logits"].shape[-1] if "logits" in call else next(t for n, t in call.items() if "weight" in n).shape[0]
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


def calls() -> dict[str, Arguments]:
    """Right ones of the public operators, and of the private ones that Python calls with lists of its own."""
    lists = {op for op in OPERATORS if any(str(a.type) in ("List[int]", "List[float]") for a in arguments_of(op))}
    return public_calls() | {op: call for op, call in product_calls().items() if op in lists and "_bwd" not in op}


def right_call(op: str, argument: str) -> Arguments:
    """In which the argument has a value, if it is a tensor or a list."""
    torch.manual_seed(0)
    call = calls()[op]
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
    found = [s for text in documentation(operator).text for s in re.split(r"(?<=[.:;]) ", text)]
    theirs = {name for s in found if "options" in s for name in re.findall(r"\w+", s) if name in operators()}
    theirs |= {operator.base.__name__} if operator.base else set()
    return found + [s for name in theirs - {op} for s in sentences(name)]


def says(op: str, argument: str, rule: str) -> bool:
    word = rf"\b{argument.rpartition('_')[2]}s?\b" if argument.endswith("softcap") else rf"\b{argument}\b"
    text = " ".join(sentences(op))
    return any(
        re.search(rule, s) and re.search(word, s) for s in re.split(r"\. ", text)
    )


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
    shapes = {name: d for name, d in described(op).items() if call.get(name) is not None}
    others = {name: d for name, d in shapes.items() if name != argument}
    yield "freed", freed
    if argument not in shapes:
        return  # of a private operator
    yield "a string", lambda t: "x"
    if others:
        yield "on another device", lambda t: t.to("meta")
    yield "sparse", lambda t: t.to_sparse()
    if argument in operators()[op].constants and t.is_floating_point():
        yield "with a gradient", lambda t: t.clone().requires_grad_()
    mine = shapes[argument]
    yield from ((f"of {dtype}".replace("torch.", ""), lambda t, d=dtype: t.to(d)) for dtype in wrong_dtypes(op, mine, shapes))
    if mine.is_of("indices"):
        yield from of_indices(op, argument)
    leading = any("..." in d.shapes for d in others.values())
    if " or " in mine.shapes:
        return
    named = [letter for d in others.values() for letter in re.findall(r"\.\.\.|[A-Z][a-z]?|[a-z]", d.shapes)]
    if "..." not in mine.shapes or leading:
        yield "with one more dimension", lambda t: t.unsqueeze(0)
    if mine.shapes != "(...)" or leading:
        yield "a scalar", lambda t: torch.zeros((), dtype=t.dtype)
    written = dimensions(mine.shapes)
    if mine.note.startswith("each") or argument not in described(op):
        return
    for i, part in enumerate(reversed(written)):
        known = set(re.findall(r"\.\.\.|[A-Z][a-z]?|[a-z]", part))
        if part.isdigit() or known & set(named) or re.match(r"\d ", part):
            dim = -1 - i
            if t.dim() >= -dim:
                yield f"with a longer dimension {dim}", lambda t, dim=dim: longer(t, dim)


def wrong_dtypes(op: str, mine: Described, others: dict[str, Described]) -> list[torch.dtype]:
    """"Those of a call have the same dtype unless a note says otherwise.\""""
    if mine.is_of("indices"):
        return [torch.float32, torch.int16, torch.bool]
    if mine.is_of("bool"):
        return [torch.float32, torch.int64]
    if mine.is_of("complex"):
        return [torch.float32]
    found = [torch.int64, torch.complex64]
    if "any floating" in mine.note:
        return found
    kinds = ("indices", "bool", "complex")
    same = [d for d in others.values() if not d.note.startswith("in ") and not any(map(d.is_of, kinds))]
    bound = len(same) > 1 if mine in same else True
    return found + [torch.float64] * bound


def of_indices(op: str, argument: str) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Numbers out of range, unless they only have to be equal, or the documentation has a meaning for them."""
    if argument in ("seq_idx", "shift_labels") or any("outside of" in s and "dropped" in s for s in sentences(op)[:40]) and argument == "index":
        return
    for value in (-1, FAR, LEAST, MOST):
        yield f"with {value}", lambda t, value=value: with_number(t, value)
    yield f"all {MOST}", lambda t: torch.full_like(t, MOST)
    if argument == "cu_seqlens":
        for ends in ([0, 3, 1, 4], [1, 4], [0, 3], [0, 5], [2, 2], [0, -1, 4], []):
            yield f"{ends}", lambda t, ends=ends: torch.tensor(ends, dtype=t.dtype)


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
        yield "wrapping to the right sum", [MOST, *values[1:-1], *[sum(values) - MOST - sum(values[1:-1])][: len(values) - 1]]


def of_option(op: str, argument: str, kind: str) -> Iterator[tuple[str, Any]]:
    if kind == "str":
        yield "unknown", "unknown"
        yield "empty", "" if argument != "group" else "\0"
        yield "a number", 3
    if kind == "bool":
        yield "a string", "yes"
    if kind == "float":
        yield "a string", "1.0"
        yield from ((str(value), value) for value in (math.nan, math.inf, -math.inf))
        if says(op, argument, r"\bpositive\b"):
            yield from ((str(value), value) for value in (0.0, -1.0))
        if says(op, argument, "not negative"):
            yield "-1.0", -1.0
        if says(op, argument, r"lies in \[0, 1\]"):
            yield from ((str(value), value) for value in (-0.5, 1.5))
    if kind == "int":
        yield "a string", "1"
        # Any number may mark rows that do not count.
        if argument != "ignore_index":
            yield str(LEAST), LEAST
            # A limit, or a number of steps, may be as large as one likes.
            if argument not in ("memory_budget", "sinkhorn"):
                yield str(MOST), MOST
        if argument in ("top_k", "groups", "top_groups", "group_size", "dilation", "memory_budget", "sinkhorn"):
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
            for what, wrong in of_list(value, note):
                add(name, what, lambda call, n=name, what=what, note=note: call | {n: dict(of_list(call[n], note))[what]})
            if op in PUBLIC:
                add(name, "a number", lambda call, n=name: call | {n: 3})
            for what, change in of_tensor(op, name, call, value[0]) if isinstance(value[0], Tensor) else ():
                add(name, f"[0] {what}", lambda call, n=name, c=change: replaced(call, n, 0, c))
        else:
            for what, value in of_option(op, name, kind):
                add(name, what, lambda call, n=name, v=value: call | {n: v})
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


def serve(channel: Any, op: str) -> None:
    """Writes the outcomes of an operator's wrong calls: a process for each."""
    for wrong in wrong_calls(op):
        with tempfile.TemporaryFile("w+") as out:
            pid = os.fork()
            if not pid:
                with suppress(BaseException):
                    signal.alarm(20)
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
                    for learns in (False, True) if not op.endswith("_") else (False,):
                        out.write(json.dumps(attempt(wrong, learns)) + "\n")
                        out.flush()
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out.seek(0)
            messages = [json.loads(line) for line in out]
        if status:
            messages.append(f"CRASHES: {signal.Signals(-status).name}")
        channel.write(json.dumps(messages) + "\n")
        channel.flush()


def outcomes(op: str) -> list[list[str]]:
    """Of each of an operator's wrong calls: what happens without and with a graph."""
    # The first backward of a process would import the second module.
    modules = ["wrong_calls", "torch.fx.experimental.symbolic_shapes"]
    fork = Fork(f"import wrong_calls; wrong_calls.serve(channel, {op!r})", sys.stdout, sys.stderr, modules)
    try:
        found = [fork.receive(time.monotonic() + 600) for _ in wrong_calls(op)]
    finally:
        fork.close()
    return found


def complaint(wrong: Wrong, messages: list[str]) -> str | None:
    """Why this is not what a wrong call must do."""
    if not messages:
        return "nothing ran"
    family = re.sub("(_with_.*|_)$", "", wrong.op)  # variants share their code
    family = "_?" if wrong.op.startswith("_") else family  # its caller may have a name of its own
    # Where two arguments clash, the message may be about the other one.
    clashes = re.search("long|short|empty|device|dimension|float64", wrong.what) or wrong.argument == "classes"
    names = "|".join(a.name for a in arguments_of(wrong.op)) if clashes else wrong.argument
    rule = re.compile(rf"{family}\w*( backward)?: .*\b({names})\b")
    return next((message for message in messages if not rule.match(message)), None)
