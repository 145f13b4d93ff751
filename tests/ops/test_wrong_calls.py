"""Wrong calls of every operator: none ends the process, none passes, and the message names operator, argument,
rule and what came."""

import re

import pytest
import torch
from torch import Tensor

from liger_ops.reference import operators
from tests.support.operator_calls import arguments_of, backward, differentiable
from tests.support.wrong_calls import HUGE, Wrong, complaint, described, dimensions, outcomes, right_calls, wrong_calls

OPERATORS = sorted(right_calls())
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

    return {name: widened(name, t) for name, t in right_calls()[op].items()}


@pytest.mark.thorough
@pytest.mark.library
@pytest.mark.parametrize("learned", ["all", "the first"])
@pytest.mark.parametrize("op", LINEAR_LOSSES)
def test_a_memory_budget_that_forward_takes_is_enough_for_backward(op, learned, device):
    reductions = ("mean", "none") if "reduction" in operators()[op].choices else (None,)
    taken = 0
    for call, reduction in ((call, r) for call in (right_calls()[op], in_wide_rows(op)) for r in reductions):
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


@pytest.mark.library
@pytest.mark.parametrize("shape", [(2**31, 4), (4, 2**31)], ids=["rows", "columns"])
@pytest.mark.parametrize(
    ("op", "name", "second"),
    [
        ("cross_entropy", "logits", "labels"),
        ("fused_add_rms_norm", "x", "alike"),
        ("jsd", "input", "alike"),
        ("kl_div", "input", "alike"),
        ("layer_norm", "x", None),
        ("log_probs", "logits", "labels"),
        ("rms_norm", "x", None),
        ("rms_norm_gated", "x", "alike"),
        ("sigmoid_gate", "x", "alike"),
        ("tvd", "input", "alike"),
    ],
)
def test_rows_that_no_kernel_can_count_are_refused_on_the_meta_device(op, name, second, shape):
    x = torch.empty(shape, device="meta")
    seconds = dict(alike=[x], labels=[torch.empty(shape[0], dtype=torch.int64, device="meta")])
    with pytest.raises(RuntimeError, match=rf"^{op}: {name} must have fewer than 2\^31 rows and columns \(got "):
        operators()[op](x, *seconds.get(second, []))
