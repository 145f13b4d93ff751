"""sigmoid_gate against its formula in fp64."""

import math

import pytest
import torch
from torch import Tensor

from tests.support.checks import CPU_DTYPES, HALF_TYPES, check_op, gradients, sizes_around_tiles
from tests.support.pairs import sizes_by_device

sigmoid_gate = torch.ops.liger.sigmoid_gate
KINDS = ("full", "full and residual", "per row", "per row and residual")


def reference(x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
    out = x * torch.sigmoid(gate)
    return out if residual is None else residual + out


def make(shape, dtype, device, kind="full") -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    x, dy, gate, residual = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    inputs = [x, 2 * (gate[..., :1] if "per row" in kind else gate), *([residual] if "residual" in kind else [])]
    return [t.clone().requires_grad_() for t in inputs], [dy]


@sizes_by_device(
    cpu=[1, 7, 2560],
    cuda=[1, 7, 131, 2560, *sizes_around_tiles("sigmoid_gate_fwd", "sigmoid_gate_bwd")],
    dtype=CPU_DTYPES,
)
def test_sizes(n, dtype, device):
    for kind, shape in zip(KINDS, ((n,), (3, n), (2, 5, n), (11, n))):
        check_op(sigmoid_gate, reference, *make(shape, dtype, device, kind), device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_kinds(kind, dtype, device):
    check_op(sigmoid_gate, reference, *make((3, 17, 264), dtype, device, kind), device)


def test_a_gate_inside_of_a_projection(device):
    """As attention has it: the second half of each head of q's projection, and numbers of heads in another order."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, 5, 4, 16, device=device, requires_grad=True), torch.randn(2, 5, 4, 16, device=device)
    both = torch.randn(2, 5, 4, 32, device=device)
    check_op(sigmoid_gate, reference, [x, both.chunk(2, -1)[1].requires_grad_()], [dy], device)
    numbers = torch.randn(2, 4, 5, device=device).transpose(1, 2).unsqueeze(-1).requires_grad_()
    check_op(sigmoid_gate, reference, [x, numbers], [dy], device)
    turned = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    check_op(sigmoid_gate, reference, [turned, numbers], [dy], device)


def test_nan_and_infinity(device):
    values = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -1.0, 2.0], device=device)
    x, gate = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(values, values, indexing="ij"))
    dy = torch.ones_like(x)
    for ours, theirs in zip(gradients(sigmoid_gate, [x, gate], [dy]), gradients(reference, [x, gate], [dy])):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.library
def test_backward_overwrites_a_gradient_that_no_residual_takes(device):
    (x, gate, residual), _ = make((4, 64), torch.float32, device, "full and residual")
    for learned in (False, True):
        out = sigmoid_gate(x, gate, residual.detach().requires_grad_(learned)).square().sum()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            out.backward()
        (name,) = {e.name for e in seen.events() if e.name.startswith("liger::_sigmoid_gate_bwd")}
        assert name.endswith("_bwd_") != learned


def test_the_gradient_of_a_residual_is_the_incoming_one(device):
    (x, gate, residual), (dy,) = make((4, 64), torch.float32, device, "full and residual")
    y = sigmoid_gate(x, gate, residual) * 1.0
    dx, dresidual = torch.autograd.grad(y, (x, residual), dy)
    assert torch.equal(dresidual, dy) and torch.equal(dx, *torch.autograd.grad(sigmoid_gate(x, gate), x, dy))


ROWS = torch.ones(2, 8)
ERRORS = {
    "other columns": ((ROWS, torch.ones(2, 4)), "gate must have the shape of x.*or 1 as its last dimension"),
    "other rows": ((ROWS, torch.ones(3, 1)), "gate must have the shape of x.*or 1 as its last dimension"),
    "fewer dimensions": ((ROWS, torch.ones(1)), "gate must have the shape of x.*or 1 as its last dimension"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"sigmoid_gate: {message}.*got "):
        sigmoid_gate(*arguments)
