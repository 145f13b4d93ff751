"""What tests know of an operator by its declaration alone. The call of an operator on rows, such as `x: (..., n),
alpha: (n,)`, follows from it: a new one needs no entry in the lists of operator_calls.py, models.py or test_memory.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from liger_ops.reference import Operator, operators
from liger_ops.reference._calls import Shapes, described_tensors

TENSORS = ("Tensor", "Tensor | None")


def is_constant(operator: Operator) -> bool:
    """Whether no result has a gradient. Such an operator's own file tests what test_every_operator.py tests of others."""
    tensors = [name for name, p in operator.__signature__.parameters.items() if p.annotation == "Tensor"]
    return all(name in operator.constants for name in tensors)


def is_plain(operator: Operator) -> bool:
    """Whether a call follows from the declaration: a size is that of the rows' width, a multiple of it, or a number, the
    elements are floating point, and other arguments have defaults."""
    described = described_tensors(operator).values()
    # Of several shapes, the first is the default.
    shapes = [t.shapes.partition(")")[0].strip("(") for t in described]
    needed = [p for p in operator.__signature__.parameters.values() if p.default is p.empty]
    return (
        len(set(re.findall("[A-Za-z]+", " ".join(shapes)))) == 1
        and "..." not in shapes
        and not any(t.is_of(kind) for t in described for kind in ("indices", "bool", "complex"))
        and all(p.annotation in TENSORS for p in needed)
    )


@cache
def plain_operators() -> dict[str, Operator]:
    return {name: o for name, o in operators().items() if not o.alias_of and is_plain(o)}


def shapes_of(operator: Operator, leading: Sequence, width: int) -> dict[str, tuple]:
    """Of all tensors of a plain operator, in the order of its arguments. leading: the sizes for "..."."""
    shapes = Shapes(lambda letter: width, lambda: [*leading], lambda written: written[0])
    described = described_tensors(operator)
    names = [name for name in operator.__signature__.parameters if name in described]
    return {name: tuple(shapes.shape(described[name].shapes)) for name in names}
