"""Wrong calls of every operator: none ends the process, none passes, and the message names operator, argument,
rule and what came."""

import re

import pytest
import torch
from torch import Tensor

import liger_ops.kernels as tables
from liger_ops.aot.codegen import operators_of
from liger_ops.reference import operators
from liger_ops.reference._calls import SIZES, Shapes, shapes_of
from tests.support.operator_calls import arguments_of, backward, differentiable, public_call
from tests.support.wrong_calls import (
    HUGE,
    Wrong,
    complaint,
    described,
    dimensions,
    operators_to_call,
    outcomes,
    wrong_calls,
)

OPERATORS = operators_to_call()
LINEAR_LOSSES = [op for op in OPERATORS if any(a.name == "memory_budget" for a in arguments_of(op))]


def formless(wrong: Wrong, messages: list[str]) -> str | None:
    """A message without the rule, or without what came."""
    if wrong.what == HUGE:  # see complaint
        return None
    return next((message for message in messages if not re.match(r".* must .*\(got ", message)), None)


@pytest.mark.thorough
@pytest.mark.library
@pytest.mark.parametrize("op", OPERATORS)
def test_wrong_calls_are_refused(op):
    found = zip(wrong_calls(op), outcomes(op), strict=True)
    bad = {
        f"{w.argument} {w.what}": why
        for w, messages in found
        if (why := complaint(w, messages) or formless(w, messages))
    }
    assert not bad, "\n" + "\n".join(f"{call}: {why}" for call, why in bad.items())


def in_wide_rows(op: str) -> dict:
    """A call in bfloat16 whose hidden states have more columns than there are classes."""

    def widened(name: str, t):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        return t.repeat(1, 16).bfloat16() if dimensions(described(op)[name].shapes)[-1] in ("n", "m") else t.bfloat16()

    return {name: widened(name, t) for name, t in public_call(op).items()}


@pytest.mark.thorough
@pytest.mark.library
@pytest.mark.parametrize("learned", ["all", "the first"])
@pytest.mark.parametrize("op", LINEAR_LOSSES)
def test_a_memory_budget_that_forward_takes_is_enough_for_backward(op, learned, device):
    reductions = ("mean", "none") if "reduction" in operators()[op].choices else (None,)
    taken = 0
    for call, reduction in ((call, r) for call in (public_call(op), in_wide_rows(op)) for r in reductions):
        for budget in sorted({int(1.25**k) for k in range(50)}):
            given = differentiable(op, call | dict(memory_budget=budget), device)
            given |= {} if reduction is None else dict(reduction=reduction)
            wanted = [name for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad]
            given |= {name: given[name].detach() for name in wanted[1:] if learned == "the first"}
            try:
                out = operators()[op](**given)
            except RuntimeError as error:
                assert re.match(rf"{op}: memory_budget must", str(error))
                continue
            taken += 1
            backward(tuple(out) if isinstance(out, tuple) else out)
    assert taken


def that_count_in_32_bits() -> list[str]:
    """Whose kernels do, of those that take rows of any strides: columns, or rows with a result for each."""

    def counts(kernel):
        return "inner_rows" in kernel.args and (
            kernel.args["n"] == "i32" or ".losses." in kernel.function.fn.__module__
        )

    launched_by = operators_of()
    kernels = [k for k in tables.kernels() if counts(k)]
    found = {op for k in kernels for op in launched_by[k.name]}
    return [op for op in OPERATORS if op in found and op not in LINEAR_LOSSES]


@pytest.mark.library
@pytest.mark.parametrize("rows, columns", [(2**31, 4), (4, 2**31)], ids=["rows", "columns"])
@pytest.mark.parametrize("op", that_count_in_32_bits())
def test_rows_that_no_kernel_can_count_are_refused_on_the_meta_device(op, rows, columns):
    first, *_ = described(op)
    last = dimensions(described(op)[first].shapes)[-1]
    shapes = Shapes(lambda letter: columns if letter == last else SIZES[letter], lambda: [rows], lambda texts: texts[0])
    dtypes = {name: t.dtype for name, t in public_call(op).items() if isinstance(t, Tensor)}
    given = {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")
        for name, shape in shapes_of(operators()[op], shapes, ()).items()
    }
    with pytest.raises(RuntimeError, match=rf"^{op}: {first} must have fewer than 2\^31 rows and columns \(got "):
        operators()[op](**given)
