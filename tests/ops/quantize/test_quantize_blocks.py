"""quantize_blocks: its scales. test_quantizers.py has what all quantisers do."""

import math

import pytest
import torch

from liger_ops import functional as F
from liger_ops.reference.quantize_blocks import BLOCKS, for_each
from tests.support.families.quantizers import check

each = pytest.mark.parametrize("block", BLOCKS)


def test_scales_lie_as_scaled_mm_takes_them(device):
    x = torch.randn(7, 300, device=device)
    assert F.quantize_blocks(x)[1].stride() == (1, 7)
    assert F.quantize_blocks(x, block="128x128")[1].is_contiguous()


@each
def test_a_block_has_a_scale_of_its_own(block, device):
    x = torch.randn(256, 256, device=device)
    x[:128, :128] *= 1e20
    q, scale = check(f"quantize_blocks {block}", x)
    sizes = (128,) if block == "1x128" else (128, 128)
    error, allowed = (q.float() * for_each(scale, q, *sizes) - x).abs(), x.abs() / 16
    assert (error[128:] <= allowed[128:] + 0.02).all() and (error[:, 128:] <= allowed[:, 128:] + 0.02).all()


@each
def test_zeros_nan_and_infinity(block, device):
    x = torch.randn(300, 300, device=device)
    x[1], x[:128, :128] = 0, 0
    x[200, 3], x[140, 150], x[299, 299] = math.nan, math.inf, -math.inf
    _, scale = check(f"quantize_blocks {block}", x)
    assert scale[0, 0].item() == 1
    if block == "1x128":
        assert scale[200, 0].isnan() and scale[140, 1].isinf() and scale[199].isfinite().all()
    else:
        assert scale[1, 0].isnan() and scale[1, 1].isinf() and scale[0].isfinite().all()


def test_an_unknown_block():
    with pytest.raises(RuntimeError, match="quantize_blocks: block must be '1x128' or '128x128'.*got "):
        F.quantize_blocks(torch.ones(2, 8), block="1x64")
