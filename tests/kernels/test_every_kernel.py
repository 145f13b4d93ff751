"""Operators on their kernels, in Triton's interpreter: every row of models.py, at widths on both sides of those at which tables
choose another config."""

from collections.abc import Iterator
from functools import cache

import kernel_process
import pytest
import torch
from models import ROWS, SIZE, VOCABULARY, WIDTH, Row
from rows import NAME_OF, bind, check_as_accurate, contiguous, of_leaves, of_temporaries
from torch import Tensor

import liger_ops.kernels as tables
from liger_ops.aot.codegen import operators_of

# The gradient of an embedding needs kernels if many tokens share a row.
WITHOUT = ("embedding",)
# Columns. A router has no more experts, and many heads are slow.
NARROW, MOST = 1100, {"moe_router": 1024, "delta_gates": 1100}


def with_nan_behind(t: Tensor) -> Tensor:
    """The same rows in a wider tensor."""
    if not t.is_floating_point() or not t.dim():
        return t.detach().clone()
    n = t.shape[-1]
    return torch.cat([t.detach(), torch.full((*t.shape[:-1], 8), float("nan"), dtype=t.dtype)], -1)[..., :n]


launched_by = cache(operators_of)


@cache
def kernels_of(op: str) -> list[tables.Kernel]:
    stems = {stem for stems in launched_by().values() for stem in stems if op.startswith(stem)}
    own = max(stems, key=len, default="")
    return [kernel for kernel in tables.kernels() if own in launched_by().get(kernel.name, [])]


def unit_of(row: Row) -> int:
    """The size of models.py that is the number of columns of the row's kernels."""
    shapes = [*row.inputs.values(), *row.parameters.values()]
    if "rope" in row.op:
        return SIZE
    return VOCABULARY if any(VOCABULARY in shape for shape in shapes) and "gate" not in row.inputs else WIDTH


def is_fixed(row: Row) -> bool:
    """Whether other sizes depend on the number of columns."""
    words = ("conv", "moe_experts", "hyper", "lora", "embedding")
    options = {"group_size", "classes", "mrope_section", "groups"}
    return any(word in row.op for word in words) or not options.isdisjoint(row.options)


def widths(row: Row) -> Iterator[int]:
    unit = unit_of(row)
    yield unit
    if is_fixed(row):
        return
    found = set()
    for kernel in kernels_of(row.op):
        for bound in {c.max_n for c in kernel.configs if c.max_n}:
            found |= {bound, bound + 1}
    step, most = (2, 2048) if "rope" in row.op else (1, MOST.get(row.op, 17_000))
    yield from sorted(n for n in found if 2 * unit < n <= most and n % step == 0)


def scaled(row: Row, n: int) -> Row:
    unit = unit_of(row)

    def resized(shapes):
        return {
            name: tuple(d // unit * n if isinstance(d, int) and d % unit == 0 and d else d for d in shape)
            for name, shape in shapes.items()
        }

    return row._replace(inputs=resized(row.inputs), parameters=resized(row.parameters))


def cases() -> Iterator:
    """Of the first row of an operator all widths, of which narrow ones and the widest are quick. Of other rows narrow ones, of
    which the first is quick. Dtypes and layouts take turns."""
    seen = set()
    for row in ROWS:
        if row.op.startswith("fp8_"):  # its GEMMs need a GPU
            continue
        found = [*widths(row)]
        if row.op in seen:
            found = [n for n in found if n < NARROW]
        for i, n in enumerate(found):
            # Kernels of adapters multiply half-precision rows alone.
            dtype = torch.float16 if i % 2 or row.op == "lora_linear" else torch.float32
            is_quick = not i or row.op not in seen and (n < NARROW or n == found[-1])
            marks = [] if is_quick else [pytest.mark.thorough]
            yield pytest.param(row, n, dtype, i // 2 % 2, marks=marks, id=f"{NAME_OF[id(row)]}-{n}-{str(dtype)[6:]}")
        seen.add(row.op)


@pytest.mark.parametrize("device", ["interpreted"])
@pytest.mark.parametrize("row, n, dtype, held", cases())
def test_rows(row, n, dtype, held, device):
    call = bind(scaled(row, n), batch=2, length=3, dtype=dtype)
    slopes = [torch.randn_like(r) if r.is_floating_point() else torch.zeros_like(r) for r in call.op(*call.tensors)]
    count = len(call.tensors) + len(slopes)
    theirs = of_leaves(call._replace(op=call.formula), call.tensors, slopes, [contiguous] * count)
    run, change = (of_leaves, with_nan_behind) if held else (of_temporaries, contiguous)
    kernel_process.launched.clear()
    ours = run(call, call.tensors, slopes, [change] * count)
    has_kernels = row.op not in WITHOUT and row.options.get("a") != []
    assert kernel_process.launched or not has_kernels
    # Linear losses store logits in half precision, which may round them either way.
    noise = torch.finfo(dtype).eps if dtype == torch.float16 and row.op.startswith("fused_linear") else 0.0
    check_as_accurate(call, ours, theirs, call.tensors, slopes, noise)
