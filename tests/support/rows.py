"""Tests over the rows of models.py: parametrization, and a row's call as a function of its tensors."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from checks import like
from models import NAMES, ROWS, Call, Row, in_lists, inputs_of, outputs
from torch import Tensor

from liger_ops.reference import operators

NAME_OF = {id(row): name for row, name in zip(ROWS, NAMES)}
each_row = pytest.mark.parametrize("row", ROWS, ids=NAMES)


def in_tiers(rows: Sequence[Row] = ROWS, one_of: int = 1) -> pytest.MarkDecorator:
    """`parametrize` over rows, for slow tests: the first row of each operator is quick, the others are thorough.
    one_of: more is thorough, only one of so many operators is quick."""
    first = list({row.op: row for row in reversed(rows)}.values())[::one_of]
    cases = [
        pytest.param(
            row, id=NAME_OF[id(row)], marks=[] if any(row is quick for quick in first) else pytest.mark.thorough
        )
        for row in rows
    ]
    return pytest.mark.parametrize("row", cases)


class Bound(NamedTuple):
    """A row's call: its operator and its formula as functions of `tensors`, which return a tuple of results."""

    op: Callable[..., tuple[Tensor, ...]]
    formula: Callable[..., tuple[Tensor, ...]]
    tensors: list[Tensor]
    names: list[str]

    def differentiable(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(result for result in self.op(*tensors) if result.requires_grad)

    def upstream(self) -> list[Tensor]:
        return [torch.randn_like(result) for result in self.differentiable(*self.tensors)]


def bind(row: Row, device: str = "cpu", batch: int = 3, length: int = 5, dtype: torch.dtype = torch.float32) -> Bound:
    """Every tensor that may require a gradient does."""
    module = Call(row)
    given = dict(zip(row.inputs, inputs_of(row, batch, length, requires_grad=True)))
    given |= {name.rpartition(".")[2]: t for name, t in (*module.named_parameters(), *module.named_buffers())}
    names, overwrites = list(given), module.overwrites
    tensors = [like(t.detach().to(device).requires_grad_(t.requires_grad), dtype) for t in given.values()]

    def function(op: Callable) -> Callable[..., tuple[Tensor, ...]]:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            first = [tensors[0] * 1] if overwrites else [tensors[0]]  # a leaf must not be overwritten
            return outputs(op(**in_lists(dict(zip(names, [*first, *tensors[1:]]))), **row.options))

        return call

    return Bound(function(module.op), function(operators()[row.op].reference), tensors, names)
