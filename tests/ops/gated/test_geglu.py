"""geglu, geglu_packed and geglu_linear: their approximation. test_gated.py has what swiglu does too."""

import pytest
import torch

geglu = torch.ops.liger.geglu


def test_tanh_is_the_default(device):
    x = torch.randn(4, 64, device=device)
    assert torch.equal(geglu(x, x), geglu(x, x, "tanh")) and not torch.equal(geglu(x, x), geglu(x, x, "none"))


def test_unknown_approximation_is_refused():
    """test_wrong_calls.py has the packed and linear operators."""
    with pytest.raises(RuntimeError, match=r"^geglu: approximate must be 'tanh' or 'none' \(got 'erf'\)"):
        geglu(torch.ones(2, 8), torch.ones(2, 8), approximate="erf")
