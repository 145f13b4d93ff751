"""Every operator compared with its formula. hypothesis draws shapes, strides, dtypes, options and which inputs require
gradients (strategies.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from torch import Tensor

from liger_ops.reference import Operator, operators
from tests.support.calls import in_lists
from tests.support.checks import assert_no_worse, gradients, like, path_taken, roundings
from tests.support.strategies import calls, own_test_file

SPLIT = ("group", "classes", "class_sizes", "sequence_dim")


def rounding(operator: Operator, arguments: dict[str, Any]) -> tuple[float, ...]:
    """Of the first results: the operator's tests define it as `noise` where terms may cancel."""
    module = own_test_file(operator)
    if operator.alias_of:  # split over a group of one rank, which changes no number
        arguments = {name: value for name, value in arguments.items() if name not in SPLIT}
    name = operator.__name__.removeprefix("vocab_parallel_")
    found = module.noise(name, **arguments) if hasattr(module, "noise") else ()
    return found if isinstance(found, tuple) else (found,)


def precision(operator: Operator, arguments: dict[str, Any]) -> torch.dtype | None:
    """Of intermediate results that the operator may round other than its formula does, if its tests define one."""
    module = own_test_file(operator)
    return module.precision(**arguments) if hasattr(module, "precision") else None


def check(operator: Operator, arguments: dict[str, Any]) -> None:
    flat = {n: v for n, v in arguments.items() if isinstance(v, Tensor)}
    for name, value in arguments.items():
        flat |= {
            f"{name}[{i}]": v for i, v in enumerate(value if isinstance(value, list) else []) if isinstance(v, Tensor)
        }
    names, given_tensors = list(flat), list(flat.values())
    overwrites = operator.__name__.endswith("_")

    def bind(function: Callable) -> Callable:
        def call(*tensors: Tensor) -> Any:
            named = dict(zip(names, tensors))
            if overwrites:  # must not overwrite a leaf or the caller's memory
                named[names[0]] = named[names[0]] * 1
            return function(**arguments | in_lists(named))

        return call

    def outputs(result: Any) -> tuple[Tensor, ...]:
        return tuple(result) if isinstance(result, tuple) else (result,)

    exact = bind(operator.reference)
    doubles = [like(t, torch.float64) for t in given_tensors]
    generator = torch.Generator().manual_seed(0)
    upstream = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs(exact(*doubles))]
    before = [t.detach().clone() for t in given_tensors]
    with path_taken("cpu"):
        ours = gradients(bind(operator), [like(t) for t in given_tensors], upstream)
    assert all(torch.equal(t, b) for t, b in zip(given_tensors, before))
    eager = gradients(exact, [like(t) for t in given_tensors], upstream)
    oracle = gradients(exact, doubles, upstream)
    bounds = roundings(exact, given_tensors, upstream, oracle, precision(operator, arguments))
    dtype = next(t.dtype for t in given_tensors if t.is_floating_point())
    count = len(upstream)
    scale = max((float(g.abs().max()) for g in upstream if g.numel()), default=0.0)
    assert len(ours) == len(eager) == len(oracle)
    for i, results in enumerate(zip(ours, eager, oracle)):
        if not results[0].is_floating_point():
            assert torch.equal(results[0], results[2]), f"result {i}"
            continue
        # NaN is correct for the mean over no rows.
        assert all(torch.equal(t.isnan(), results[2].isnan()) for t in results), f"result {i}: NaN"
        results = [t.nan_to_num() for t in results]
        # In fp64, eager is the oracle and has no error.
        noise = 1e-12 if dtype == torch.float64 else 0.0
        noise += sum(rounding(operator, arguments)[i : i + 1])
        assert_no_worse(f"result {i}", *results, scale=scale if i >= count else 0.0, noise=noise, bounds=(bounds, i))


def check_calls(operator: Operator, count: int, chosen: int) -> None:
    @seed(chosen)
    @settings(
        max_examples=count,
        derandomize=not chosen,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(operator))
    def run(arguments: dict[str, Any]) -> None:
        check(operator, arguments)

    run()


@pytest.mark.parametrize("name", operators())
def test_the_operator_equals_its_formula_in_a_few_calls(name, request):
    check_calls(operators()[name], 15, request.config.getoption("--seed"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", operators())
def test_the_operator_equals_its_formula(name, request):
    check_calls(operators()[name], 60, request.config.getoption("--seed"))
