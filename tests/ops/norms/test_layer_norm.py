"""layer_norm: its optional parameters and its statistics. test_norms.py has what all norms do."""

import pytest
import torch

from tests.support.checks import CPU_DTYPES
from tests.support.families import norms
from tests.support.families.norms import check, make
from tests.support.pairs import pairwise

layer_norm = torch.ops.liger.layer_norm
PRESENT = {"weight and bias": (True, True), "weight": (True, False), "bias": (False, True), "neither": (False, False)}


@pairwise(present=PRESENT, parameter_dtype=[None, torch.float32], dtype=CPU_DTYPES, eps=[1e-5, 1e-2])
def test_options(dtype, parameter_dtype, present, eps, device):
    (x, *parameters), grads = make("layer_norm", (3, 4, 96), dtype, device, parameter_dtype)
    parameters = [t if wanted else None for t, wanted in zip(parameters, PRESENT[present])]
    check("layer_norm", [x, *parameters], grads, device, eps=eps)


# With a mean of 1e3, computing a variance of 1 from the sum of squares would cancel in fp32. The remaining error is the
# rounding of the mean, in eager too; enough rows make its maximum comparable.
@pytest.mark.parametrize("n", [64, 1000, 4096, 20_000, 40_008])
def test_a_large_mean_causes_no_cancellation(n, device):
    (x, *parameters), grads = make("layer_norm", (64, n), torch.float32, device)
    x = (x.detach() + 1e3).requires_grad_()
    check("layer_norm", [x, *parameters], grads, device)


def test_a_constant_row_becomes_the_bias(device):
    bias = torch.randn(64, device=device)
    y = layer_norm(torch.full((2, 64), 7.0, device=device), torch.ones(64, device=device), bias)
    assert torch.equal(y, bias.expand(2, 64))


def noise(name, x, weight, bias, eps, **_):
    return tuple(norms.noise(1, [x], x, weight, eps, centred=True))
