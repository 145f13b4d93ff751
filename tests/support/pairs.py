"""Grids of test cases that hold every pair of values of two axes, instead of every combination of all axes.
tests/ops/test_properties.py draws combinations at random."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]  # two axes with the position of a value on each


def rows(lengths: list[int]) -> list[tuple[int, ...]]:
    """Positions on axes of these lengths, such that each pair of positions on two axes is in some row."""
    axes = range(len(lengths))
    missing: dict[Pair, None] = {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(axes, 2)
        for i in range(lengths[a])
        for j in range(lengths[b])
    }
    found = [] if len(lengths) > 1 else [(i,) for i in range(lengths[0])]
    while missing:
        row = dict(next(iter(missing)))
        for axis in axes:
            if axis not in row:
                # Equally useful values take turns.
                turns = [(len(found) + i) % lengths[axis] for i in range(lengths[axis])]
                row[axis] = max(turns, key=lambda i: gain(missing, row, (axis, i)))
        found.append(tuple(row[axis] for axis in axes))
        for pair in itertools.combinations(enumerate(found[-1]), 2):
            missing.pop(pair, None)
    return found


def gain(missing: dict[Pair, None], row: dict[int, int], value: tuple[int, int]) -> int:
    """How many missing pairs the value adds to a row."""
    return sum(tuple(sorted((value, other))) in missing for other in row.items())


def pairs_of(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples of a value of each axis that hold every pair of values of two axes. Of a dict, the keys are the values."""
    values = [list(axis) for axis in axes]
    return [tuple(v[i] for v, i in zip(values, row)) for row in rows([len(v) for v in values])]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """`parametrize` over these arguments, with every pair of values of two arguments.

    The id of a value is its name or text; of a dict, the keys are the values."""
    cases, names = pairs_of(*axes.values()), list(axes)
    ids = ["-".join(getattr(value, "__name__", str(value)) for value in case) for case in cases]
    return pytest.mark.parametrize(names, cases if len(names) > 1 else [case[0] for case in cases], ids=ids)


def kernels_in_tiers() -> pytest.MarkDecorator:
    """`parametrize` over the names of kernels, one of each file. Those after the first of a family are thorough: each compiles
    the same way."""
    import liger_ops.kernels as tables

    families, names, files = set(), [], set()
    for kernel in tables.kernels():
        file = kernel.function.fn.__module__
        if file in files:
            continue
        files.add(file)
        family = kernel.function.fn.__module__.split(".")[-2]
        names.append(pytest.param(kernel.name, marks=[pytest.mark.thorough] * (family in families)))
        families.add(family)
    return pytest.mark.parametrize("name", names)


def sizes_by_device(cpu: Iterable[Any], cuda: Iterable[Any], **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """`pairwise` over these axes and the size n, with own sizes on each device: CPU code has no tiles."""
    cases = []
    for device, sizes, marks in (("cpu", cpu, ()), ("cuda", cuda, pytest.mark.gpu)):
        values = [list(values) for values in (sizes, *axes.values())]
        for row in rows([len(v) for v in values]):
            case = [device, *(v[i] for v, i in zip(values, row))]
            cases.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return pytest.mark.parametrize(["device", "n", *axes], cases)
