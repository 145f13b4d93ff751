"""fused_linear_divergence: what test_linear_losses.py does not cover."""

import math

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import OF_EAGER
from tests.support.checks import HALF_TYPES, assert_no_worse, assert_no_worse_overall, gradients, like, overall_error
from tests.support.families import linear_losses
from tests.support.families.linear_losses import least_budget, logit_error, of_divergence, relative
from tests.support.pairs import pairwise

divergence = F.fused_linear_divergence
reference = divergence.reference
BETAS = [0.0, 1.0, 0.3]


def make(tokens, classes, dtype=torch.float32, device="cpu", hidden=16, bias=True, **options):
    """Named tensors of two models. Without options: a divergence per token, of a beta of 0."""
    return of_divergence(((tokens,), hidden, classes), dtype, device, bias=bias, **options)


# ---- Values


def test_vocab_map_of_all_classes_changes_nothing(device):
    given, _ = make(60, 50, device=device)
    order = torch.randperm(50, device=device)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(50, device=device)).int()
    other = {name: given[name][order] for name in ("t_weight", "t_bias")}
    for ours, theirs in zip(divergence(**given | other, vocab_map=back), divergence(**given)):
        # Of both results, and of the two sums of exponentials whose ratio is the share of the classes.
        assert (ours - theirs).abs().max() <= 4 * logit_error(**given)


@pytest.mark.parametrize("beta", BETAS)
def test_pytorchs_own_functions(beta):
    given, _ = make(12, 50, torch.float64)
    found, entropy = divergence(**given, beta=beta, temperature=2.0)
    s, t = (nnf.linear(*(given[f"{p}_{n}"] for n in ("input", "weight", "bias"))).div(2).log_softmax(-1) for p in "st")
    kl = lambda p, q: nnf.kl_div(q, p, log_target=True, reduction="none").sum(-1)  # noqa: E731
    m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta)) if 0 < beta < 1 else None
    expected = kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, m) + (1 - beta) * kl(s, m)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=s.detach()).entropy())


@pairwise(dtype=[torch.float32, torch.bfloat16], distance=[1e-1, 1e-2, 1e-3], beta=BETAS)
def test_close_models(dtype, distance, beta, device):
    """Rounding must not hide a small divergence. The error is compared with that of log_softmax and kl_div on logits
    that were computed in fp32."""
    given, _ = make(64, 2000, dtype, device, 32, bias=False)
    x, w = given["s_input"], given["s_weight"]
    tx = (x.detach().float() * (1 + distance * torch.randn(64, 32, device=device))).to(dtype)
    inputs = x, w, tx, w.detach().clone()
    found = divergence(*inputs, beta=beta)[0]
    exact = reference(*(t.double() for t in inputs), beta=beta)[0]
    plain = reference(*(t.float() for t in inputs), beta=beta)[0]
    error, allowed = ((t.double() - exact).abs().max() for t in (found, plain))
    assert error <= allowed
    slopes = [
        torch.autograd.grad(f(*i, beta=beta)[0].sum(), i[0])[0].double()
        for f, i in ((divergence, inputs), (reference, [like(t, torch.float64) for t in inputs]))
    ]
    assert overall_error(*slopes) < (2 * torch.finfo(dtype).eps if dtype in HALF_TYPES else 1e-6 / distance)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_models_have_no_divergence(beta, device):
    x, w = (torch.randn(n, 16, device=device, requires_grad=True) for n in (10, 300))
    found = divergence(x, w, x.detach(), w.detach(), beta=beta)[0]
    assert not found.any() and torch.autograd.grad(found.sum(), x)[0].abs().max() < 1e-6


@pytest.mark.parametrize("beta", BETAS)
def test_impossible_classes(beta, device):
    """A bias of -inf removes a class, from both models or from one."""
    inf = math.inf
    given, _ = make(4, 30, device=device)
    x, b, tb = given["s_input"], given["s_bias"].data, given["t_bias"]
    b[3], tb[3] = -inf, -inf
    if beta != 1:
        tb[7] = -inf
    if beta != 0:
        b[8] = -inf
    found = divergence(**given, beta=beta)
    torch.testing.assert_close([*found], [*reference(**given, beta=beta)])
    assert found[0].isfinite().all() and torch.autograd.grad(found[0].sum(), x)[0].isfinite().all()
    tb[9] = -inf
    assert (divergence(**given, beta=1.0)[0] == inf).all()


@pytest.mark.parametrize("beta", [*BETAS, "of 700 classes"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_masked_positions_are_not_read(reduction, beta, device):
    given, others = make(6, 300, device=device, beta=beta, reduction=reduction)
    mask = torch.tensor([1, 1, 0, 1, 0, 1], device=device).bool()
    given["t_input"][2], given["t_input"][4] = math.nan, math.inf
    found, entropy = divergence(**given, **others, mask=mask)
    slopes = torch.autograd.grad(found.sum(), [t for t in given.values() if t.requires_grad])
    assert found.isfinite().all() and all(s.isfinite().all() for s in slopes)
    assert not slopes[0][~mask].any() and not entropy[~mask].any()


def test_no_classes(device):
    given, _ = make(5, 0, device=device)
    found, entropy = divergence(**given)
    assert not found.any() and not entropy.any() and not torch.autograd.grad(found.sum(), given["s_input"])[0].any()


@pytest.mark.thorough
@pairwise(spread=[0.1, 2.0], reduction=["mean", "none"], parts=[1, 5, 60], dtype=HALF_TYPES)
def test_chunked_gradients_are_as_accurate_as_eager(spread, reduction, parts, dtype, device):
    """Eager code with logits in the dtype of the inputs. The smaller the spread of the logits, the smaller is the error of
    their rounding, beside that of d weight in each chunk."""
    given, others = make(1024, 4000, dtype, device, bias=False, reduction=reduction)
    for name in ("s_weight", "t_weight"):
        given[name].data *= spread / 2
    inputs, of_token = [*given.values()], 4000 * (2 * 4 + 2)
    budget = least_budget(divergence, **given, **others) + of_token * (1024 // parts)

    def eager(x, w, tx, tw):
        s, t = (nnf.linear(*i).float().log_softmax(-1) for i in ((x, w), (tx, tw)))
        losses = nnf.kl_div(s, t, log_target=True, reduction="none").sum(-1)
        return losses.mean() if reduction == "mean" else losses

    call = lambda op, **more: lambda *t: op(*t, reduction=reduction, **more)[0]  # noqa: E731
    # Scaled, so that results are normal numbers of fp16.
    grad = [torch.tensor(1024.0, device=device) if reduction == "mean" else torch.randn(1024, device=device)]
    ours = gradients(call(divergence, memory_budget=budget), inputs, grad)
    theirs = gradients(eager, [like(t) for t in inputs], grad)
    oracle = gradients(call(reference), [like(t, torch.float64) for t in inputs], grad)
    for i, (mine, other, truth) in enumerate(zip(ours[1:], theirs[1:], oracle[1:], strict=True)):
        assert_no_worse(f"gradient {i}", mine, other, truth)
        # cuBLAS rounds the product of a small GEMM before it adds to it: with the gradients of logits and five sums, that
        # is 1.58 times the error of eager code's two roundings.
        assert_no_worse_overall([mine], [other], [truth], OF_EAGER if device == "cpu" else 1.7)


# ---- Errors


X, W, MAP = torch.ones(2, 3, 8), torch.ones(10, 8), torch.zeros(10).long()
ERRORS = {
    "teacher positions": (dict(t_input=X[:1]), r"t_input must have shape \[2, 3\] and one dimension more"),
    "teacher classes": (dict(t_weight=W[:9]), "t_weight must have 10 classes like s_weight"),
    "map": (dict(vocab_map=MAP[1:]), r"vocab_map must have shape \[10\]"),
    "map of a mixture": (dict(vocab_map=MAP, beta=0.5), "vocab_map must be None unless beta is 0"),
    "map and group": (dict(vocab_map=MAP, group="0", classes=10), "vocab_map must be None with a group"),
    "mask": (dict(mask=torch.ones(2, 3)), "mask must be bool"),
    "mask shape": (dict(mask=torch.ones(2).bool()), r"mask must have shape \[2, 3\]"),
    "beta": (dict(beta=1.5), "beta must be between 0 and 1"),
    "temperature": (dict(temperature=0.0), "temperature must be positive and finite"),
}


@pytest.mark.library
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=rf"^fused_linear_divergence: {message}.*\(got "):
        divergence(**dict(s_input=X, s_weight=W, t_input=X, t_weight=W) | arguments)


precision = linear_losses.precision  # for test_properties.py


def vary(draw, arguments):
    if arguments["beta"] != 0:
        arguments["vocab_map"] = None


def noise(op, **arguments):
    """Of the results as in check(). Gradients are sums of logits' gradients, whose terms may cancel: what remains is the
    error of the terms, which 16-bit operators also round."""
    error = logit_error(**arguments)
    given = {
        k: v.detach().double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()
    }
    exact = reference(**given)
    x, weight = given["s_input"], given["s_weight"]
    logits = nnf.linear(x, weight, given["s_bias"]).requires_grad_()
    of_logits = given | dict(s_input=logits, s_weight=torch.eye(len(weight), dtype=torch.double), s_bias=None)
    (slope,) = torch.autograd.grad(reference(**of_logits).divergence.sum(), logits)
    slope, rows = (s.nan_to_num().abs().reshape(-1, s.shape[-1]) for s in (slope, x))
    terms = slope @ weight.abs(), slope.t() @ rows, slope.sum(0)
    dtype = arguments["s_input"].dtype
    error = 2 * error + (torch.finfo(dtype).eps if dtype in HALF_TYPES else 0.0)
    wanted = [arguments[name] for name in ("s_input", "s_weight", "s_bias")]
    gradients = [
        error * max(1.0, float(t.max()) if t.numel() else 0.0)
        for t, of in zip(terms, wanted)
        if of is not None and of.requires_grad
    ]
    return *(relative(error, t) for t in exact), *gradients
