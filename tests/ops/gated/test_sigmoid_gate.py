"""sigmoid_gate against its formula in fp64."""

import math

import pytest
import torch
from checks import CPU_DTYPES, HALF_TYPES, LAYOUTS, check_op, gradients, sizes_around_tiles
from pairs import pairwise, sizes_by_device
from torch import Tensor

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


@pairwise(layout=LAYOUTS, kind=KINDS, of=["x", "gate", "residual", "grad"])
def test_layouts(layout, kind, of, device):
    inputs, grads = make((4, 6, 10, 64), torch.float32, device, kind)
    at = {"x": 0, "gate": 1, "residual": 2, "grad": 3}[of]
    if at == 3:
        grads = [LAYOUTS[layout](grads[0])]
    elif at < len(inputs) and not (of == "gate" and "per row" in kind):
        inputs[at] = LAYOUTS[layout](inputs[at].detach()).requires_grad_()
    check_op(sigmoid_gate, reference, inputs, grads, device)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
def test_gradients_that_are_wanted(wanted, kind, device):
    inputs, grads = make((7, 96), torch.float32, device, kind)
    inputs = [t.detach().requires_grad_(bool(w)) for t, w in zip(inputs, wanted)]
    if any(t.requires_grad for t in inputs):
        check_op(sigmoid_gate, reference, inputs, grads, device)


def test_nan_and_infinity(device):
    values = torch.tensor([math.nan, -math.inf, math.inf, 0.0, -1.0, 2.0], device=device)
    x, gate = (t.flatten().clone().requires_grad_() for t in torch.meshgrid(values, values, indexing="ij"))
    dy = torch.ones_like(x)
    for ours, theirs in zip(gradients(sigmoid_gate, [x, gate], [dy]), gradients(reference, [x, gate], [dy])):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_backward_overwrites_an_unreferenced_gradient(device):
    def run(*residual):
        (x, gate), (dy,) = make((4, 64), torch.float32, device)
        (held,) = torch.autograd.grad(sigmoid_gate(x, gate, *residual), x, dy)
        assert held.data_ptr() != dy.data_ptr()
        y = sigmoid_gate(x, gate, *residual) * 1.0
        seen = []
        y.grad_fn.next_functions[0][0].register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
        (dropped,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(held, dropped)
        return seen == [dropped.data_ptr()]

    assert run() and run(torch.randn(4, 64, device=device))


def test_the_gradient_of_a_residual_is_the_incoming_one(device):
    (x, gate, residual), (dy,) = make((4, 64), torch.float32, device, "full and residual")
    y = sigmoid_gate(x, gate, residual) * 1.0
    dx, dresidual = torch.autograd.grad(y, (x, residual), dy)
    assert torch.equal(dresidual, dy) and torch.equal(dx, *torch.autograd.grad(sigmoid_gate(x, gate), x, dy))


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    inputs, _ = make((3, 5), torch.float64, "cpu", kind)
    assert torch.autograd.gradcheck(sigmoid_gate, inputs)


ROWS = torch.ones(2, 8)
ERRORS = {
    "integers": ((ROWS.long(), ROWS), "x must be float32, float16, bfloat16 or float64"),
    "other dtype": ((ROWS, ROWS.half()), "gate must have the dtype of x"),
    "other columns": ((ROWS, torch.ones(2, 4)), "gate must have the shape of x.*or 1 as its last dimension"),
    "other rows": ((ROWS, torch.ones(3, 1)), "gate must have the shape of x.*or 1 as its last dimension"),
    "fewer dimensions": ((ROWS, torch.ones(1)), "gate must have the shape of x.*or 1 as its last dimension"),
    "residual": ((ROWS, ROWS, torch.ones(8)), "residual must have the shape of x"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"sigmoid_gate: {message}.*got "):
        sigmoid_gate(*arguments)
