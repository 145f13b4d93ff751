"""relu_squared against its formula in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.checks import CPU_DTYPES, HALF_TYPES, check_op, gradients, sizes_around_tiles
from tests.support.pairs import sizes_by_device

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


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_value_is_rounded_as_torch_does(dtype, device):
    """To nearest, ties to even."""
    x = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    torch.testing.assert_close(relu_squared(x), reference(x.float()).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_nan_and_infinity(device):
    """Like relu: NaN propagates, and the gradient is zero unless x is positive, even if the upstream is infinite."""
    x = torch.tensor([math.nan, -math.inf, math.inf, -0.0, -1.0, 2.0], device=device, requires_grad=True)
    for grad in (1.0, math.inf):
        dy = torch.full_like(x, grad)
        for ours, theirs in zip(gradients(relu_squared, [x], [dy]), gradients(reference, [x], [dy])):
            torch.testing.assert_close(ours, theirs, equal_nan=True)
