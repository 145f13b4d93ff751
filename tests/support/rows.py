"""Tests over the rows of calls.py: parametrization, and a row's call as a function of its tensors."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from liger_ops._accuracy import noise_of, roundings
from liger_ops.reference import operators
from tests.support.calls import NAMES, ROWS, Dtypes, Row, RowModule, in_lists, inputs_of, outputs
from tests.support.checks import HALF_TYPES, assert_no_worse, gradients, like, wanted_of

NAME_OF = {id(row): name for row, name in zip(ROWS, NAMES)}


def first_of(rows: Sequence[Row]) -> list[Row]:
    """The first of each operator."""
    return list({row.op: row for row in reversed(rows)}.values())


FIRST = first_of(ROWS)
# For tests of graphs, of which an operator is one node whatever its options are: with all tensors, and without optional ones.
PLAIN = [row for row in ROWS if not row.options or any(row is first for first in FIRST)]
each_row = pytest.mark.parametrize("row", ROWS, ids=NAMES)


def in_tiers(rows: Sequence[Row] = ROWS, one_of: int = 1) -> pytest.MarkDecorator:
    """`parametrize` over rows, for slow tests: the first row of each operator is quick, the others are thorough.
    one_of: more is thorough, only one of so many operators is quick."""
    first = first_of(rows)[::one_of]
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


def bind(
    row: Row,
    device: str = "cpu",
    batch: int = 3,
    length: int = 5,
    dtype: torch.dtype = torch.float32,
    wide: bool = False,
) -> Bound:
    """Every tensor that may require a gradient does. wide: tensors that may be fp32 beside half-precision rows are."""
    module = RowModule(row)
    given = dict(zip(row.inputs, inputs_of(row, batch, length, requires_grad=True)))
    given |= {name.rpartition(".")[2]: t for name, t in (*module.named_parameters(), *module.named_buffers())}
    names, overwrites = list(given), module.overwrites
    dtypes = Dtypes(operators()[row.op], dtype, lambda: wide)
    tensors = [
        like(
            t.detach().to(device).requires_grad_(t.requires_grad), dtypes.of(name.partition("[")[0]) if wide else dtype
        )
        for name, t in given.items()
    ]

    def function(op: Callable) -> Callable[..., tuple[Tensor, ...]]:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            first = [tensors[0] * 1] if overwrites else [tensors[0]]  # a leaf must not be overwritten
            return outputs(op(**in_lists(dict(zip(names, [*first, *tensors[1:]]))), **row.options))

        return call

    return Bound(function(module.op), function(operators()[row.op].reference), tensors, names)


# ---- Calls with tensors of other layouts, and what they may differ by


class Temporary(torch.autograd.Function):
    """A copy that nobody else holds, whose memory backward may overwrite. It keeps the strides of a dense tensor."""

    @staticmethod
    def forward(ctx, t, change):
        return change(t).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Upstream(torch.autograd.Function):
    """Replaces the upstream gradient by a temporary."""

    @staticmethod
    def forward(ctx, t, make):
        ctx.make = make
        return t.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.make().clone(), None


Change = Callable[[Tensor], Tensor]


def upstream_of(call: Bound) -> list[Tensor]:
    """Upstream gradients of all results."""
    found = call.op(*call.tensors)
    return [torch.randn_like(r) if r.is_floating_point() else torch.zeros_like(r) for r in found]


def contiguous(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)


def of_leaves(call: Bound, tensors: list[Tensor], upstream: list[Tensor], changes: list[Change]) -> list[Tensor]:
    """Results and gradients, of tensors and upstream gradients that the caller holds."""
    changed = [change(t).requires_grad_(t.requires_grad) for t, change in zip([*tensors, *upstream], changes)]
    return gradients(call.op, changed[: len(tensors)], changed[len(tensors) :])


def of_temporaries(call: Bound, tensors: list[Tensor], upstream: list[Tensor], changes: list[Change]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    found = call.op(*(Temporary.apply(t, change) for t, change in zip(leaves, changes)))
    values = [r.detach().clone() for r in found]
    roots = [
        Upstream.apply(r, lambda grad=grad, change=change: change(grad))
        for r, grad, change in zip(found, upstream, changes[len(tensors) :])
        if r.requires_grad
    ]
    del found
    return values + [*torch.autograd.grad(roots, wanted_of(leaves), [torch.zeros_like(r) for r in roots])]


def check_as_accurate(
    row: Row,
    call: Bound,
    ours: list[Tensor],
    theirs: list[Tensor],
    inputs: list[Tensor],
    upstream: list[Tensor],
    device: str,
) -> None:
    """Of the same numbers in memory of another layout, which other code may serve. device: "cpu" or that of kernels."""
    noise = noise_of(row.op, device)
    dtype = next(t.dtype for t in inputs if t.is_floating_point())
    # Linear losses store logits in half precision there, which may round them either way.
    noise += torch.finfo(dtype).eps if device != "cpu" and dtype in HALF_TYPES and "fused_linear" in row.op else 0.0
    exact = gradients(call.formula, [like(t, torch.float64) for t in inputs], upstream)
    bounds = roundings(call.formula, inputs, upstream, exact)
    scale = max((float(g.abs().max()) for g in upstream if g.numel()), default=0.0)
    for i, results in enumerate(zip(ours, theirs, exact, strict=True)):
        if not results[0].is_floating_point():
            mine, *others = results
            # A rounding may decide between two.
            assert ((mine == others[0]) | (mine == others[1])).all(), f"result {i}"
            continue
        # Gradients of adapters in fp32 are GEMMs of rows that experts round to half precision.
        rounded = torch.finfo(dtype).eps if "moe_experts" in row.op and results[0].dtype != dtype else 0.0
        assert_no_worse(f"result {i}", *results, scale if i >= len(upstream) else 0.0, noise + rounded, (bounds, i))
