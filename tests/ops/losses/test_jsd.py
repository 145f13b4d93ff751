"""jsd: what test_logits_losses.py does not cover."""

import math

import pytest
import torch

from liger_ops.functional import jsd
from tests.support.families.logits_losses import divergence_noise as noise  # noqa: F401
from tests.support.oracles.divergences import PLAIN


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_probabilities_of_zero(beta, device):
    """They contribute zero, unless the divergence is infinite."""
    x = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.2, 0.8, 0.0]], device=device).log().requires_grad_()
    t = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.0, 0.3, 0.7, 0.0]], device=device).log()
    loss = jsd(x, t, beta=beta, reduction="none")
    expected = PLAIN["jsd"](x.double(), t.double(), beta=beta)
    expected = torch.where(t.exp() + x.exp() == 0, 0, expected.nan_to_num(0, posinf=math.inf))
    if beta not in (0, 1):
        weights = torch.tensor([beta * math.log(1 / beta), (1 - beta) * math.log(1 / (1 - beta))])
        expected[0, 2], expected[0, 1] = 0.5 * weights
    torch.testing.assert_close(loss, expected.float())
    (slope,) = torch.autograd.grad(loss[1].sum(), x)
    assert slope[1].isfinite().all() and slope[1, 0] == slope[1, 3] == 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_equal_distributions(beta, device):
    x = torch.randn(4, 100, device=device).log_softmax(-1)
    assert jsd(x, x.clone(), beta=beta).abs() < 1e-6


@pytest.mark.library
@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_beta_must_be_a_weight(beta):
    with pytest.raises(RuntimeError, match=r"jsd: beta must be (between 0 and 1|finite) \(got "):
        jsd(torch.ones(2, 8), torch.ones(2, 8), beta=beta)
