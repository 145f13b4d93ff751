"""kl_div against its formula in fp64 and torch.nn.functional.kl_div."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from divergences import REDUCTIONS, DivergenceTests, noise  # noqa: F401


class TestKlDiv(DivergenceTests):
    name = "kl_div"
    choices = [{}, dict(log_target=True)]

    def in_logs(self, options):
        return "log_target" in options

    @staticmethod
    def plain(input, target, **options):
        return F.kl_div(input, target, reduction="none", **options)

    @pytest.mark.parametrize("log_target", [False, True])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("shape", [(8,), (3, 8), (3, 2, 8)])
    def test_pytorch(self, shape, reduction, log_target, device):
        x, t, _ = self.make(shape, torch.float32, device, dict(log_target=True) if log_target else {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the meaning of "mean"
            expected = F.kl_div(x, t, reduction=reduction, log_target=log_target)
        loss = self.op(x, t, reduction=reduction, log_target=log_target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(*(torch.autograd.grad(r.sum(), x)[0] for r in (loss, expected)))

    @pytest.mark.parametrize("log_target", [False, True])
    def test_special_values_follow_pytorch(self, log_target, device):
        inf, nan = math.inf, math.nan
        x = torch.tensor([-1.0, -inf, -inf, -1.0, nan, -1.0, inf], device=device, requires_grad=True)
        t = torch.tensor([0.0, 0.0, 0.5, 1.0, 0.5, inf, 0.5], device=device)
        t = t.log() if log_target else t
        expected = F.kl_div(x, t, reduction="none", log_target=log_target)
        loss = self.op(x, t, reduction="none", log_target=log_target)
        torch.testing.assert_close(loss, expected, equal_nan=True)
        torch.testing.assert_close(*(torch.autograd.grad(r.sum(), x)[0] for r in (loss, expected)), equal_nan=True)

    def test_probabilities_below_eps(self, device):
        x, t = torch.full((3,), -2.0, device=device), torch.tensor([0.0, 0.01, 0.5], device=device)
        for eps in (0.0, 0.1):
            expected = t * (torch.where(t > 0, t.clamp(min=eps).log(), 0) + 2)
            torch.testing.assert_close(self.op(x, t, reduction="none", eps=eps), expected)

    @pytest.mark.library
    def test_only_the_target_is_saved(self):
        x, t, _ = self.make((4, 8), torch.float32, "cpu")
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
            self.op(x, t, reduction="sum")
        assert [s.data_ptr() for s in saved] == [t.data_ptr()]

    @pytest.mark.library
    def test_eps_must_not_be_negative(self):
        with pytest.raises(RuntimeError, match=r"kl_div: eps must be finite and not negative \(got -1\)"):
            self.op(torch.ones(2, 8), torch.ones(2, 8), eps=-1.0)
