"""log_probs: what test_logits_losses.py does not cover."""

import math

import pytest
import torch

from liger_ops.functional import log_probs
from tests.support.families.logits_losses import of_log_probs


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
@pytest.mark.parametrize("ids", [None, 4])
def test_gradients_of_one_result_alone(ids, wanted, device):
    given, options = of_log_probs((3, 5, 72), device=device, ids=ids)
    found = []
    for function in (log_probs, log_probs.reference):
        (result,) = [r for r, w in zip(function(**given, **options), wanted) if w]
        weights = torch.arange(result.numel(), device=device).view(result.shape).sin()
        found.append(torch.autograd.grad((result * weights).sum(), given["logits"])[0])
    torch.testing.assert_close(*found)


def test_log_softmax(device):
    given, _ = of_log_probs((4, 9), device=device, ids=3, ignored=0)
    logits, index = given.values()
    found = log_probs(logits, index, temperature=2.0, entropy=True)
    logs = (logits / 2).log_softmax(-1)
    torch.testing.assert_close(found[0], logs.gather(-1, index))
    torch.testing.assert_close(found[1], torch.distributions.Categorical(logits=logits / 2).entropy())


def test_no_classes(device):
    found = log_probs(torch.empty(3, 0, device=device), torch.full((3,), -100, device=device), entropy=True)
    assert found[0].tolist() == found[1].tolist() == [0, 0, 0]


def test_an_unrequested_entropy_is_empty(device):
    given, _ = of_log_probs((3, 5, 8), device=device, ids=2)
    found = log_probs(**given)
    assert found[1].shape == (3, 5, 0) and not found[1].requires_grad and found[0].shape == (3, 5, 2)


def test_special_values_follow_pytorch(device):
    inf, lowest = math.inf, torch.finfo(torch.float32).min
    logits = torch.randn(7, 100, device=device)
    logits[0, 10:], logits[1], logits[2, 5], logits[3, 5], logits[4] = -inf, -inf, math.nan, inf, lowest
    logits[5, 7] = -inf
    logits.requires_grad_()
    index = torch.tensor([3, 4, 6, 5, 9, 7, -100], device=device)
    found = log_probs(logits, index)[0]
    expected = logits.log_softmax(-1).gather(-1, index.clamp(min=0)[:, None])[:, 0].masked_fill(index < 0, 0)
    torch.testing.assert_close(found, expected, equal_nan=True)
    grads = (torch.autograd.grad(r.sum(), logits)[0] for r in (found, expected))
    torch.testing.assert_close(*(g[[0, 1, 2, 3, 4, 5]] for g in grads), equal_nan=True)
    masked = log_probs(logits[:1], index[:1], entropy=True)[1]
    torch.testing.assert_close(masked, torch.distributions.Categorical(logits=logits[:1, :10]).entropy())
    assert torch.autograd.grad(masked.sum(), logits)[0].isfinite().all()


# ---- Memory


@pytest.mark.library
def test_no_probabilities_are_saved():
    given, _ = of_log_probs((4, 64), ids=2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        log_probs(**given, entropy=True)
    assert [s.data_ptr() for s in saved if s.numel() > 12] == [given["logits"].data_ptr()]


def test_results_may_be_changed_in_place(device):
    given, _ = of_log_probs((4, 64), device=device)
    logits, index = given.values()
    log_probs(logits * 1, index)[0].mul_(2).sum().backward()
    expected = torch.autograd.grad(2 * log_probs(logits, index)[0].sum(), logits)[0]
    torch.testing.assert_close(logits.grad, expected)


# ---- Errors


X, Y = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
ERRORS = {
    r"index must have shape \[2\], or that with one dimension more": (X, Y[:1]),
    "temperature must be positive and finite": (X, Y, 0.0),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.library
def test_errors(message):
    with pytest.raises(RuntimeError, match=rf"^log_probs: {message}.*\(got "):
        log_probs(*ERRORS[message])
