"""kl_div: what test_logits_losses.py does not cover."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as nnf

from liger_ops.functional import kl_div
from tests.support.families.logits_losses import divergence_noise as noise  # noqa: F401
from tests.support.families.logits_losses import of_divergence


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
@pytest.mark.parametrize("shape", [(8,), (3, 8), (3, 2, 8)])
def test_pytorch(shape, reduction, log_target, device):
    given, _ = of_divergence("kl_div", shape, device=device, options=dict(log_target=True) if log_target else {})
    x, t, _ = given.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the meaning of "mean"
        expected = nnf.kl_div(x, t, reduction=reduction, log_target=log_target)
    loss = kl_div(x, t, reduction=reduction, log_target=log_target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(r.sum(), x)[0] for r in (loss, expected)))


@pytest.mark.parametrize("log_target", [False, True])
def test_special_values_follow_pytorch(log_target, device):
    inf, nan = math.inf, math.nan
    x = torch.tensor([-1.0, -inf, -inf, -1.0, nan, -1.0, inf], device=device, requires_grad=True)
    t = torch.tensor([0.0, 0.0, 0.5, 1.0, 0.5, inf, 0.5], device=device)
    t = t.log() if log_target else t
    expected, loss = (f(x, t, reduction="none", log_target=log_target) for f in (nnf.kl_div, kl_div))
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.testing.assert_close(*(torch.autograd.grad(r.sum(), x)[0] for r in (loss, expected)), equal_nan=True)


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_probabilities_below_eps(eps, device):
    x, t = torch.full((3,), -2.0, device=device), torch.tensor([0.0, 0.01, 0.5], device=device)
    expected = t * (torch.where(t > 0, t.clamp(min=eps).log(), 0) + 2)
    torch.testing.assert_close(kl_div(x, t, reduction="none", eps=eps), expected)


@pytest.mark.library
def test_only_the_target_is_saved():
    x, t = torch.randn(4, 8, requires_grad=True), torch.rand(4, 8)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        kl_div(x, t, reduction="sum")
    assert [s.data_ptr() for s in saved] == [t.data_ptr()]


@pytest.mark.library
def test_eps_must_not_be_negative():
    with pytest.raises(RuntimeError, match=r"kl_div: eps must be finite and not negative \(got -1\)"):
        kl_div(torch.ones(2, 8), torch.ones(2, 8), eps=-1.0)
