"""rms_norm: its options, which fused_add_rms_norm has too. test_norms.py has what all norms do."""

import torch

from tests.support.checks import CPU_DTYPES
from tests.support.families import norms
from tests.support.families.norms import check, make
from tests.support.pairs import pairwise


@pairwise(
    name=["rms_norm", "fused_add_rms_norm"],
    casting_mode=["llama", "gemma", "none"],
    offset=[0.0, 1.0],
    weight_dtype=[None, torch.float32],
    dtype=CPU_DTYPES,
    eps=[1e-6, 1e-2],
)
def test_options(name, dtype, weight_dtype, offset, casting_mode, eps, device):
    inputs, grads = make(name, (3, 4, 96), dtype, device, weight_dtype)
    check(name, inputs, grads, device, eps=eps, offset=offset, casting_mode=casting_mode)


def noise(name, x, weight, eps, offset, **_):
    return tuple(norms.noise(1, [x], x, weight, eps, offset=offset))
