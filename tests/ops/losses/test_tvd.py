"""tvd: what test_logits_losses.py does not cover."""

import torch

from liger_ops.functional import tvd
from tests.support.families.logits_losses import divergence_noise as noise  # noqa: F401


def test_the_gradient_of_equal_probabilities_is_zero(device):
    x = torch.tensor([0.25, 0.5, 0.25], device=device, requires_grad=True)
    t = torch.tensor([0.25, 0.25, 0.5], device=device)
    (slope,) = torch.autograd.grad(tvd(x, t, reduction="sum"), x)
    assert slope.tolist() == [0, 0.5, -0.5]
