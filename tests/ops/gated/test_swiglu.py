"""swiglu and swiglu_packed against the formula in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.checks import path_taken
from tests.support.oracles.gated import GatedTests

LIMIT = 0.75


class TestSwiglu(GatedTests):
    op, packed, stem = torch.ops.liger.swiglu, torch.ops.liger.swiglu_packed, "swiglu"
    linear = torch.ops.liger.swiglu_linear
    # Half of the random numbers are beyond this limit. It and many of them are numbers of bf16.
    choices = [{}, {"limit": LIMIT}]

    @staticmethod
    def reference(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return F.silu(gate) * up

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_gradients_pass_at_the_limit(self, dtype, device):
        values = torch.tensor([-2.0, -LIMIT, -0.5, LIMIT, 2.0], dtype=dtype, device=device)
        gate, up = (t.clone().requires_grad_() for t in torch.cartesian_prod(values, values).unbind(1))
        for call in (
            lambda: self.op(gate, up, LIMIT),
            lambda: self.packed(torch.cat([gate, up]), LIMIT),
            lambda: self.linear(gate, up, torch.eye(25, dtype=dtype, device=device), None, LIMIT),
        ):
            with path_taken(device):
                dgate, dup = torch.autograd.grad(call().sum(), (gate, up))
            assert torch.equal(dup == 0, up.abs() > LIMIT)
            assert torch.equal(dgate == 0, gate > LIMIT)

    def test_results_without_a_limit_are_those_of_an_infinite_one(self, device):
        gate, up, grad = (30 * torch.randn(4, 1000, device=device) for _ in range(3))
        gate[0, :3] = up[1, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        found = []
        for limit in (None, math.inf):
            inputs = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
            out = self.op(*inputs, limit)
            found.append([out, *torch.autograd.grad(out, inputs, grad)])
        for plain, limited in zip(*found):
            assert torch.equal(plain.view(torch.int32), limited.view(torch.int32))

    @pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
    def test_limits_that_are_refused(self, limit):
        x = torch.ones(2, 8)
        for name, arguments in {"swiglu": (x, x), "swiglu_packed": (x,), "swiglu_linear": (x, x, x)}.items():
            with pytest.raises(RuntimeError, match=f"^{name}: limit must be positive .got {limit:g}"):
                getattr(torch.ops.liger, name)(*arguments, limit=limit)
