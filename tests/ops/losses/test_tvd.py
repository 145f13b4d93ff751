"""tvd against its formula in fp64."""

import torch
from divergences import DivergenceTests, noise  # noqa: F401


class TestTvd(DivergenceTests):
    name = "tvd"
    choices = [{}]

    def in_logs(self, options):
        return False

    @staticmethod
    def plain(input, target):
        return torch.maximum(input, target) - (input + target) / 2

    def test_the_gradient_of_equal_probabilities_is_zero(self, device):
        x = torch.tensor([0.25, 0.5, 0.25], device=device, requires_grad=True)
        t = torch.tensor([0.25, 0.25, 0.5], device=device)
        (slope,) = torch.autograd.grad(self.op(x, t, reduction="sum"), x)
        assert slope.tolist() == [0, 0.5, -0.5]
