"""relu_squared against its formula in fp64, and the common operator checks."""

import math

import pytest
import torch
import torch.nn.functional as F
from checks import (
    CPU_DTYPES,
    LAYOUTS,
    OPCHECKS,
    check_deterministic,
    check_export,
    check_inductor,
    check_no_double_backward,
    check_one_graph,
    check_op,
    check_reads_only,
    check_script,
    check_second_backward,
    gradients,
    sizes_around_tiles,
)
from torch import Tensor

relu_squared = torch.ops.liger.relu_squared


def reference(x: Tensor) -> Tensor:
    return F.relu(x).square()


class Module(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.liger.relu_squared(x)


def make(shape, dtype, device) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return [x], [torch.randn(shape, device=device, dtype=dtype)]


@pytest.mark.parametrize("n", [0, 1, 7, 131, 2560, *sizes_around_tiles("relu_squared_fwd", "relu_squared_bwd")])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_sizes(n, dtype, device):
    for shape in ((n,), (3, n), (2, 5, n)):
        inputs, grads = make(shape, dtype, device)
        if n:
            check_op(relu_squared, reference, inputs, grads, device)
        else:
            y, dx = gradients(relu_squared, inputs, grads)
            assert y.shape == dx.shape == shape


@pytest.mark.parametrize("of_grad", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, of_grad, device):
    torch.manual_seed(0)
    x, dy = (torch.randn(4, 6, 10, 64, device=device) for _ in range(2))
    dy, x = (LAYOUTS[layout](t) if changed else t for t, changed in ((dy, of_grad), (x, not of_grad)))
    check_op(relu_squared, reference, [x.detach().requires_grad_()], [dy], device)


def test_nan_and_infinity(device):
    """Like relu: NaN propagates, and the gradient is zero unless x is positive, even if the upstream is infinite."""
    x = torch.tensor([math.nan, -math.inf, math.inf, -0.0, -1.0, 2.0], device=device, requires_grad=True)
    for grad in (1.0, math.inf):
        dy = torch.full_like(x, grad)
        for ours, theirs in zip(gradients(relu_squared, [x], [dy]), gradients(reference, [x], [dy])):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_backward_overwrites_an_unreferenced_gradient(device):
    (x,), (dy,) = make((4, 64), torch.float32, device)
    (held,) = torch.autograd.grad(relu_squared(x), x, dy)
    assert held.data_ptr() != dy.data_ptr()
    y = relu_squared(x) * 1.0
    seen = []
    y.grad_fn.next_functions[0][0].register_prehook(lambda grads: seen.append(grads[0].data_ptr()))
    (dropped,) = torch.autograd.grad(y, x, dy)
    assert seen == [dropped.data_ptr()] and torch.equal(held, dropped)


def test_gradcheck():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(relu_squared, [x])


@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(requires_grad, device):
    (x,), (dy,) = make((4, 16), torch.float32, device)
    checks = dict(test_utils=OPCHECKS)
    torch.library.opcheck(relu_squared.default, [x.detach().requires_grad_(requires_grad)], **checks)
    for bwd in (torch.ops.liger._relu_squared_bwd, torch.ops.liger._relu_squared_bwd_):
        torch.library.opcheck(bwd.default, (dy.clone(), x.detach()), **checks)


def test_common_operator_checks(device):
    inputs, grads = make((4, 24), torch.float32, device)
    check_reads_only(relu_squared, inputs, grads)
    check_deterministic(relu_squared, inputs, grads)
    check_second_backward(relu_squared, inputs, grads)
    check_no_double_backward("relu_squared", relu_squared, inputs, grads)


def test_compile(device):
    def mlp(x):
        return relu_squared(x * 2).sum(-1)

    calls = [make((rows, n), torch.float32, device)[0] for rows, n in [(4, 64), (6, 128), (10, 250)]]
    check_one_graph(mlp, [(inputs, [torch.ones(len(inputs[0]), device=device)]) for inputs in calls])
    check_inductor(mlp, calls[0], [torch.ones(4, device=device)])


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict, device):
    check_export(
        relu_squared, Module(), [torch.randn(4, 32, device=device)], [torch.randn(9, 32, device=device)], strict
    )


def test_script(device, tmp_path):
    check_script(
        Module(), [make(shape, torch.float32, device)[0] for shape in [(4, 32), (2, 3, 32)]], tmp_path / "m.pt"
    )


def test_autocast_keeps_the_dtype(device):
    with torch.autocast(device, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(4, 8, device=device, dtype=dtype)
            assert relu_squared(x).dtype == dtype


def test_meta():
    x = torch.empty(5, 3, 64, device="meta", dtype=torch.bfloat16).transpose(0, 1)
    y = relu_squared(x)
    assert (y.shape, y.stride(), y.dtype, y.device.type) == (x.shape, x.stride(), x.dtype, "meta")


ERRORS = {
    "integers": (lambda: torch.ones(2, 8, dtype=torch.long), "x must be float32, float16, bfloat16 or float64"),
    "scalar": (lambda: torch.tensor(1.0), "x must have at least one dimension"),
    "sparse": (lambda: torch.eye(8).to_sparse(), "x must be a dense, unquantized tensor"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    argument, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"relu_squared: {message}.*got "):
        relu_squared(argument())
