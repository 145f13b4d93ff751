"""adapters.low_rank_input, the tokens' part of a head's adapters, against its formula in fp64."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from liger_ops.linear.adapters import low_rank_input, seeds_for
from tests.support.checks import (
    CPU_DTYPES,
    OPCHECKS,
    assert_no_worse,
    count_graphs,
    gradients,
    like,
    path_taken,
    roundings,
)
from tests.support.models.lora_dropout import dropped
from tests.support.pairs import pairwise

SCALE = [2.0, 0.5]


def make(dtype, adapter, device, ranks=(5, 3), rows=(3, 20), n=24):
    adapter = dtype if adapter == "same" else adapter
    x, *a = (torch.randn(size, device=device) for size in (rows + (n,), *((r, n) for r in ranks)))
    return [x.to(dtype).requires_grad_(), *(t.to(adapter).requires_grad_() for t in a)]


def formula(rates=(), seeds=()):
    def of(x, *a):
        parts = []
        for j, down in enumerate(a):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            wide = dropped(wide, int(seeds[j]), rates[j]) if rates and rates[j] else wide
            parts.append(SCALE[j] * functional.linear(wide, down.to(wide.dtype)))
        return torch.cat(parts, -1)

    return of


@pairwise(
    dtype=CPU_DTYPES,
    adapter=["same", torch.float32],
    ranks=[(16,), (5, 3), (40, 7)],
    rates=[(), (0.5, 0.0), (0.25, 0.25)],
)
def test_matches_the_formula(dtype, adapter, ranks, rates, device):
    tensors, rates = make(dtype, adapter, device, ranks), rates[: len(ranks)]
    torch.manual_seed(7)
    seeds = seeds_for(rates, torch.device(device))
    exact = formula(rates, [] if seeds is None else seeds.tolist())

    def ours_of(x, *a):
        torch.manual_seed(7)
        return low_rank_input(x, a, SCALE[: len(a)], rates)

    # On CUDA, GEMMs multiply fp32 activations, and a kernel drops their elements.
    launches = device == "cpu" or dtype != torch.float32 or any(rates)
    with path_taken(device) if launches else nullcontext():
        quiet = ours_of(*(t.detach() for t in tensors))
    assert quiet.dtype == torch.float32 and quiet.shape == (3, 20, sum(ranks))
    upstream = [torch.randn_like(quiet)]
    with path_taken(device) if launches else nullcontext():
        ours = gradients(ours_of, [like(t) for t in tensors], upstream)
    eager = gradients(exact, [like(t) for t in tensors], upstream)
    oracle = gradients(exact, [like(t, torch.float64) for t in tensors], upstream)
    bounds = roundings(exact, tensors, upstream, oracle, precision=torch.float32)
    for i, (name, *results) in enumerate(zip(["t", "x", "a", "a"], ours, eager, oracle)):
        assert_no_worse(name, *results, bounds=(bounds, i))


@pytest.mark.parametrize("learned", range(3))
def test_only_what_needs_a_gradient_is_computed(learned):
    tensors = [t.detach().requires_grad_(i == learned) for i, t in enumerate(make(torch.float32, "same", "cpu"))]
    grads = [
        torch.autograd.grad(of(*tensors).square().sum(), tensors[learned])[0]
        for of in (lambda x, *a: low_rank_input(x, a, SCALE), formula())
    ]
    torch.testing.assert_close(*grads)


def test_opcheck_with_dropout():
    x, *a = (t.detach() for t in make(torch.float32, "same", "cpu"))
    rates = [0.5, 0.0]
    seeds = seeds_for(rates, torch.device("cpu"))
    torch.library.opcheck(torch.ops.liger._low_rank_input.default, (x, a, SCALE, seeds, rates), test_utils=OPCHECKS)
    backward = (torch.randn(3, 20, 8), x, a, 9, SCALE, seeds, rates)
    torch.library.opcheck(torch.ops.liger._low_rank_input_bwd.default, backward, test_utils=OPCHECKS)


def test_compiled_code_has_one_graph():
    torch._dynamo.reset()
    backend, graphs = count_graphs()
    compiled = torch.compile(lambda x, *a: low_rank_input(x, a, SCALE), backend=backend, fullgraph=True)
    for rows in ((3, 20), (4, 9)):
        x, *a = make(torch.bfloat16, torch.float32, "cpu", rows=rows)
        torch._dynamo.mark_dynamic(x, (0, 1))
        torch.testing.assert_close(compiled(x, *a), low_rank_input(x, a, SCALE))
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(a=[torch.ones(3, 4), torch.ones(2, 5)]), r"a\[1\] must have shape \[rank, 4\]"),
        (dict(a=[torch.ones(3, 4), torch.ones(2, 4).half()]), r"a\[1\] must be float32 or have the dtype of x"),
        (dict(dropout=[2.0, 0.0], seeds=torch.zeros(2, dtype=torch.long)), "dropout must be between 0 and 1"),
        (dict(dropout=[0.5, 0.0]), "seeds must be given with dropout"),
    ],
)
def test_errors(changed, message):
    given = dict(x=torch.ones(5, 4), a=[torch.ones(3, 4), torch.ones(2, 4)], scale=SCALE) | changed
    with pytest.raises(RuntimeError, match=f"^lora_linear: {message}"):
        torch.ops.liger._low_rank_input(**given)
