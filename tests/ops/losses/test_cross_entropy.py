"""cross_entropy, cross_entropy_with_metrics and cross_entropy_: what test_logits_losses.py does not cover."""

import math

import pytest
import torch
import torch.nn.functional as nnf

from liger_ops.functional import cross_entropy, cross_entropy_, cross_entropy_with_metrics
from tests.support.checks import CPU_DTYPES, assert_no_worse, path_taken
from tests.support.families.logits_losses import (
    CROSS_ENTROPY,
    EXTRAS,
    OVERWRITING,
    check,
    of_cross_entropy,
    overwriting,
)
from tests.support.oracles.cross_entropies import reference_with_metrics
from tests.support.pairs import pairwise

OPS = [cross_entropy, overwriting]


def make(shape, dtype=torch.float32, device="cpu", **options):
    """(logits, target, weight or None)"""
    return [*of_cross_entropy(shape, dtype, device, **options)[0].values()]


@pairwise(reduction=["mean", "sum", "none"], weight=[None, "own"], options=EXTRAS)
def test_the_formula_equals_pytorchs(reduction, weight, options):
    given, options = of_cross_entropy((2, 6, 9), torch.float64, weight=weight, reduction=reduction, options=options)
    found = cross_entropy_with_metrics.reference(**given, **options)
    for ours, theirs in zip(found, reference_with_metrics(**given, **options), strict=True):
        torch.testing.assert_close(ours, theirs)


@pairwise(weight=[None, "own"], dtype=[torch.float32, torch.bfloat16])
def test_an_odd_vocabulary_in_padded_rows(weight, dtype, device):
    """Logits as the linear loss stores them: several programs share a row, and padding follows each row."""
    logits, *others = make((5, 50257), dtype, device, weight=weight)
    (expected,) = torch.autograd.grad(overwriting(logits, *others), logits)
    wide = torch.full((5, 50304), 7.0, dtype=dtype, device=device)
    wide[:, :50257] = logits.detach()
    cross_entropy_(wide[:, :50257], *others)
    assert (wide[:, 50257:] == 7).all()
    torch.testing.assert_close(wide[:, :50257], expected)


@pairwise(loss=[CROSS_ENTROPY, OVERWRITING], cap=[0.5, 2.0], n=[37, 40, 1001])
def test_a_cap_far_below_the_logits(loss, cap, n, device):
    """Logits masked with the lowest finite value become ordinary logits under a cap."""
    given, options = loss.make((5, n), device=device, ignored=0)
    given["logits"].data[1, : n // 2] = torch.finfo(torch.float32).min
    given["logits"].data[2, 1:] = torch.finfo(torch.float32).min
    check(loss, given, dict(options, softcap=cap), device)


def test_special_values_follow_pytorch(device):
    """NaN, infinities and the extreme finite logits."""
    inf, lowest = math.inf, torch.finfo(torch.float32).min
    logits = torch.randn(8, 100, device=device)
    logits[0, 10:], logits[1], logits[2, 5], logits[3, 5] = -inf, -inf, math.nan, inf
    logits[4], logits[5], logits[6, 7] = lowest, -lowest / 4, -inf
    target = torch.tensor([3, 4, 6, 5, 9, 9, 7, -100], device=device)
    for label_smoothing in (0.0, 0.1):
        options = dict(reduction="none", label_smoothing=label_smoothing)
        results = []
        for op in (cross_entropy, overwriting, nnf.cross_entropy):
            x = logits.clone().requires_grad_()
            loss = op(x, target, **options)
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), x)))
        for ours in results[:2]:
            torch.testing.assert_close(ours, results[2], equal_nan=True)


@pairwise(dtype=CPU_DTYPES, offset=[0.0, 64.0, -1000.0], op=OPS)
@pytest.mark.library
def test_confident_predictions_are_accurate(dtype, offset, op, device):
    """1 - p_y is accurate in the loss even far below fp32's epsilon; the gradient adds one rounding to its dtype."""
    n, gaps = 1000, [4.0, 8.0, 16.0, 32.0]
    logits = torch.full((4, n), offset, device=device)
    target = torch.tensor([0, 17, 500, 999], device=device)
    logits[torch.arange(4), target] += torch.tensor(gaps, device=device)
    logits = logits.to(dtype).requires_grad_()
    gap = (logits.detach().double()[torch.arange(4), target] - offset).tolist()
    miss = torch.tensor([(n - 1) * math.exp(-g) for g in gap], dtype=torch.float64)
    loss = op(logits, target, None, "none")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    # The relative error of an exponential is the error of its argument; a sum's grows with the root of its terms.
    rtol = (max(gaps) + n**0.5) * torch.finfo(torch.float32).eps
    assert torch.allclose(loss.detach().cpu().double(), torch.log1p(miss), rtol=rtol, atol=0)
    got, expected = grad[torch.arange(4), target].cpu().double(), -miss / (1 + miss)
    # Rounding may also be half the spacing of subnormal numbers.
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    assert torch.allclose(got, expected, rtol=rtol + eps, atol=tiny * eps / 2)


# ---- Metrics


@pairwise(n=[136, 1001, 9000], reduction=["mean", "sum", "none"], weight=[None, "fp32"], extras=EXTRAS)
@pytest.mark.library
def test_metrics(n, reduction, weight, extras, device):
    logits, target, weight = make((2, 6, n), device=device, weight=weight)
    with torch.no_grad():
        # Makes half of the predictions correct.
        logits[0].scatter_(-1, target[0].clamp(min=0)[:, None], 20.0)
    arguments, options = (logits, target, weight, reduction), EXTRAS[extras]
    with path_taken(device):
        ours = cross_entropy_with_metrics(*arguments, **options)
    oracle = reference_with_metrics(logits.double(), *arguments[1:], **options)
    eager = reference_with_metrics(*arguments, **options)
    for name, *results in zip(("loss", "z_loss", "token_accuracy"), ours, eager, oracle):
        assert_no_worse(name, *results)
    assert torch.equal(ours[3], oracle[3]) and ours[3].dtype == torch.int64
    loss = cross_entropy(*arguments, **options)
    assert torch.equal(loss, ours[0])
    grads = [torch.autograd.grad(t.sum(), logits)[0] for t in (loss, ours[0])]
    assert torch.equal(*grads)
    assert not any(t.requires_grad for t in ours[1:])
    with torch.no_grad():
        quiet = cross_entropy_with_metrics(*arguments, **options)
    assert all(torch.equal(a, b) for a, b in zip(quiet, ours))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [100, 104, 2561, 9000, 70001])
def test_ties_predict_the_first_token(n, dtype, device):
    logits = torch.zeros(7, n, device=device, dtype=dtype)
    logits[1, [40, 60]] = logits[2, [40, 60]] = logits[3, [60, n - 1]] = logits[4, n - 1] = 1.0
    logits[5] = -math.inf
    logits[6] = math.nan
    target = torch.tensor([5, 60, 40, n - 1, n - 1, 3, 3], device=device)
    with path_taken(device):
        *_, accuracy, predicted = cross_entropy_with_metrics(logits, target, None, "none")
    assert predicted[:6].tolist() == logits[:6].argmax(-1).tolist()
    assert accuracy.tolist() == [0, 0, 1, 0, 1, 0, 0]


@pytest.mark.library
def test_dense_strides_are_preserved(device):
    logits = torch.randn(6, 4, 64, device=device).transpose(0, 1).requires_grad_()
    (grad,) = torch.autograd.grad(cross_entropy(logits, torch.zeros(4, 6, dtype=torch.long, device=device)), logits)
    assert grad.stride() == logits.stride()


# ---- Errors


ONES, ZEROS = torch.ones(2, 8), torch.zeros(2, dtype=torch.long)
ERRORS = {
    "target of another shape": ((ONES, torch.zeros(3, dtype=torch.long)), {}, r"target must have shape \[2\]"),
    "target too large": ((ONES, ZEROS + 8), {}, r"target must lie in \[0, 8\) or be ignore_index, -100 "),
    "weight of another length": ((ONES, ZEROS, torch.ones(7)), {}, r"weight must have shape \[8\]"),
    "unknown reduction": ((ONES, ZEROS), dict(reduction="avg"), "reduction must be 'mean', 'sum' or 'none'"),
    "too much smoothing": ((ONES, ZEROS), dict(label_smoothing=1.5), "label_smoothing must be between 0 and 1"),
    "negative smoothing": ((ONES, ZEROS), dict(label_smoothing=-0.1), "label_smoothing must be between 0 and 1"),
    "infinite z-loss": ((ONES, ZEROS), dict(lse_square_scale=math.inf), "lse_square_scale must be finite"),
    "zero softcap": ((ONES, ZEROS), dict(softcap=0.0), "softcap must be positive and finite"),
}


@pytest.mark.parametrize("op", [cross_entropy, cross_entropy_with_metrics, cross_entropy_])
@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case, op):
    arguments, options, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=rf"^{op.__name__}: {message}.*\(got "):
        op(*arguments, **options)


@pytest.mark.library
def test_overlapping_logits_cannot_be_overwritten():
    with pytest.raises(RuntimeError, match="cross_entropy_: logits must not overlap themselves"):
        cross_entropy_(torch.ones(1, 8).expand(2, 8), ZEROS)
