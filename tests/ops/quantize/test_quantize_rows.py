"""quantize_rows, quantize_columns and quantize_both: values and scales. test_quantizers.py has what all quantisers do."""

import math

import pytest
import torch

from liger_ops import functional as F
from tests.support.checks import HALF_TYPES
from tests.support.families.quantizers import assert_same_bits, check
from tests.support.models.quantised import as_bits


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_value_is_rounded_as_torch_does(dtype, device):
    """To nearest, ties to even; subnormal numbers too. The scale is 1."""
    x = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    x = x[x.abs() <= 448]
    for op in (F.quantize_rows, F.quantize_columns):
        q, scale = op(x if op is F.quantize_rows else x.unsqueeze(1))
        assert scale.item() == 1
        assert torch.equal(as_bits(q.cpu().flatten()), as_bits(x.cpu().float().to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("name", ["quantize_rows", "quantize_columns", "quantize_both"])
def test_zeros_nan_and_infinity(name, device):
    x = torch.randn(8, 8, device=device)
    x[1], x[:, 1] = 0, 0
    x[2, 3], x[4, 5], x[6, 7] = math.nan, math.inf, -math.inf
    check(name, x)
    q, scale = F.quantize_rows(x)
    back = q.float() * scale
    assert scale[1].item() == 1 and (back[1] == 0).all()
    assert back[[2, 4, 6]].isnan().all() and back[[0, 1, 3, 5, 7]].isfinite().all()


def test_columns_are_rows_of_the_transpose(device):
    x = torch.randn(2, 5, 48, device=device)
    assert_same_bits(F.quantize_both(x), (*F.quantize_rows(x), *F.quantize_rows(x.view(10, 48).t())))


def test_error_is_half_a_unit(device):
    """At most 1 / 16 of a number, and 2^-10 of the largest one divided by 448."""
    x = torch.randn(64, 512, device=device)
    q, scale = F.quantize_rows(x)
    error, allowed = (q.float() * scale - x).abs(), x.abs() / 16 + scale * 2**-10
    assert (error <= allowed * (1 + 1e-6)).all()
