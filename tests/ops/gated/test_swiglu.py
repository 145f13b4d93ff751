"""swiglu, swiglu_packed and swiglu_linear: their limit. test_gated.py has what geglu does too."""

import math

import pytest
import torch

from tests.support.checks import path_taken

LIMIT = 0.75
swiglu, swiglu_packed, swiglu_linear = (
    getattr(torch.ops.liger, f"swiglu{form}") for form in ("", "_packed", "_linear")
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_pass_at_the_limit(dtype, device):
    values = torch.tensor([-2.0, -LIMIT, -0.5, LIMIT, 2.0], dtype=dtype, device=device)
    gate, up = (t.clone().requires_grad_() for t in torch.cartesian_prod(values, values).unbind(1))
    for call in (
        lambda: swiglu(gate, up, LIMIT),
        lambda: swiglu_packed(torch.cat([gate, up]), LIMIT),
        lambda: swiglu_linear(gate, up, torch.eye(25, dtype=dtype, device=device), None, LIMIT),
    ):
        with path_taken(device):
            dgate, dup = torch.autograd.grad(call().sum(), (gate, up))
        assert torch.equal(dup == 0, up.abs() > LIMIT)
        assert torch.equal(dgate == 0, gate > LIMIT)


def test_results_without_a_limit_are_those_of_an_infinite_one(device):
    gate, up, grad = (30 * torch.randn(4, 1000, device=device) for _ in range(3))
    gate[0, :3] = up[1, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    found = []
    for limit in (None, math.inf):
        inputs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
        out = swiglu(*inputs, limit)
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    for plain, limited in zip(*found):
        assert torch.equal(plain.view(torch.int32), limited.view(torch.int32))


def test_a_limit_of_zero_is_refused():
    """test_wrong_calls.py has other limits, and the packed and linear operators."""
    with pytest.raises(RuntimeError, match=r"^swiglu: limit must be positive \(got 0\)"):
        swiglu(torch.ones(2, 8), torch.ones(2, 8), limit=0.0)
