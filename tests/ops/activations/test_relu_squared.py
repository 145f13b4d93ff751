"""relu_squared against its formula in fp64, and its kernels in the interpreter."""

import math

import pytest
import torch
import torch.nn.functional as F
from checks import (
    CPU_DTYPES,
    LAYOUTS,
    check_op,
    gradients,
    sizes_around_tiles,
)
from pairs import pairwise, sizes_by_device
from torch import Tensor

relu_squared = torch.ops.liger.relu_squared


def reference(x: Tensor) -> Tensor:
    return F.relu(x).square()


def make(shape, dtype, device) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return [x], [torch.randn(shape, device=device, dtype=dtype)]


@sizes_by_device(
    cpu=[1, 7, 2560],
    cuda=[1, 7, 131, 2560, *sizes_around_tiles("relu_squared_fwd", "relu_squared_bwd")],
    dtype=CPU_DTYPES,
)
def test_sizes(n, dtype, device):
    for shape in ((n,), (3, n), (2, 5, n)):
        check_op(relu_squared, reference, *make(shape, dtype, device), device)


@pairwise(layout=LAYOUTS, of_grad=[False, True])
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


# ---- The kernels in the interpreter

INTERPRETED = """
import types, sys, torch, numpy
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
from liger_ops.kernels import find

def run(path, n, aligned):
    torch.manual_seed(0)
    # Rows in two levels: 2 blocks of 4, the last one partial.
    rows, inner = 7, 4
    wide, y, dy = torch.randn(rows, 2 * n), torch.full((rows, n), float("nan")), torch.randn(rows, n)
    x, kept = wide[:, n:], dy.clone()
    strided, plain = (inner * 2 * n, 2 * n), (inner * n, n)
    forward, backward = (find("relu_squared_" + k).pick({"X": "fp32"}, n, aligned) for k in ("fwd", "bwd"))
    for variant, tensors, strides in ((forward, (y, x), (*plain, *strided)),
                                      (backward, (dy, dy, x), (*plain, *plain, *strided))):
        c = variant.config.constexprs
        grid = (-(-rows // c["BLOCK_M"]) * -(-n // c["BLOCK_N"]),)
        variant.kernel.function[grid](*tensors, rows, n, inner, *strides, **c)
    numpy.savez(path, x=x.contiguous(), y=y, dy=kept, dx=dy)
"""
INTERPRETED_CASES = [(64, True), (200, True), (1032, True), (5, False), (1030, False)]


@pytest.mark.parametrize("case", INTERPRETED_CASES)
def test_kernels_interpreted(case, interpreted):
    got = interpreted[case]
    x = got["x"].double().requires_grad_()
    y = reference(x)
    (dx,) = torch.autograd.grad(y, x, got["dy"].double())
    torch.testing.assert_close(got["y"].double(), y.detach(), rtol=2e-7, atol=0)
    torch.testing.assert_close(got["dx"].double(), dx, rtol=3e-7, atol=0)
