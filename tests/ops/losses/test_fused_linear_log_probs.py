"""fused_linear_log_probs: what test_linear_losses.py does not cover."""

import math

import pytest
import torch

from liger_ops import functional as F
from tests.support.checks import CPU_DTYPES, assert_no_worse, like
from tests.support.families import linear_losses
from tests.support.families.linear_losses import check, least_budget, of_log_probs
from tests.support.pairs import pairwise

op = F.fused_linear_log_probs
with_sums = F.fused_linear_log_probs_with_log_sum_exp
EXTRAS = dict(mean_logits=True, log_sum_sq_probs=True, is_top1=True)


# For test_properties.py.
noise, precision = linear_losses.noise, linear_losses.precision


def vary(draw, arguments):
    """For test_properties.py: the terms of this mean may cancel."""
    arguments["mean_logits"] = False
    if arguments["group"] and arguments["classes"] == 1:
        arguments["softcap"] = None  # 0, but for the last bit of tanh, which ATen computes after the exchange


# ---- Results


@pairwise(
    upstream=["log_probs", "entropy", "log_sum_exp"],
    announced=[False, True],
    ids=[None, 3],
    frozen=["", "weight bias", "input"],
)
def test_gradients_of_one_result_alone(upstream, announced, ids, frozen, device):
    given, others = of_log_probs(((40,), 32, 100), torch.float32, device, ids=ids, frozen=frozen, bias=True)
    others |= dict(entropy=True, entropy_grad=announced)
    form = with_sums if upstream == "log_sum_exp" else op
    wanted = [name for name, t in given.items() if t.requires_grad]
    grads = []
    for function, dtype in ((form, torch.float32), (form.reference, torch.float64)):
        leaves = {name: like(t, dtype) for name, t in given.items()}
        found = getattr(function(**leaves, **others), upstream)
        weights = torch.arange(found.numel(), device=device, dtype=dtype).view(found.shape).sin()
        grads.append(torch.autograd.grad((found * weights).sum(), [leaves[name] for name in wanted]))
    for ours, exact in zip(*grads):
        torch.testing.assert_close(ours, exact.float(), rtol=1e-4, atol=1e-5)


@pairwise(dtype=CPU_DTYPES, softcap=[None, 2.0], ids=[None, 1, 5])
def test_facts_about_the_distribution(dtype, softcap, ids, device):
    given, others = of_log_probs(((4, 30), 16, 50), dtype, device, ids=ids, bias=True)
    for name in ("weight", "bias"):  # equal logits: the first is top
        given[name].data[7] = given[name].data[3]
    others["target"][1] = 7
    others |= dict(softcap=softcap, temperature=0.8, entropy=True, **EXTRAS)
    exact = {name: like(t, torch.float64) for name, t in given.items()}
    found, eager, expected = (
        f(**t, **others) for f, t in zip((with_sums, *[with_sums.reference] * 2), (given, given, exact))
    )
    for name in ("mean_logits", "log_sum_sq_probs"):
        assert not getattr(found, name).requires_grad
        results = [getattr(r, name).detach() for r in (found, eager, expected)]
        assert_no_worse(name, *results, scale=1.0, noise=4 * torch.finfo(dtype).eps)
    results = [r.log_sum_exp.detach() for r in (found, eager, expected)]
    assert_no_worse("log_sum_exp", *results, noise=4 * torch.finfo(dtype).eps)
    assert found.is_top1.dtype == torch.bool and found.is_top1.shape == others["target"].shape
    # A rounded logit may tie with, or exceed, the largest.
    differing = (found.is_top1 != expected.is_top1).sum()
    assert differing <= (0 if dtype == torch.float32 else 0.03 * others["target"].numel()), differing
    assert not found.is_top1[1].any() or dtype != torch.float32
    assert not (found.is_top1 & (others["target"] == -100)).any()


def test_unrequested_results_are_empty(device):
    given, others = of_log_probs(((3, 5), 8, 20), torch.bfloat16, device, ids=2)
    found = op(**given, **others)
    assert [t.shape for t in found] == [(3, 5, 2)] + [(0,)] * 4
    assert [t.dtype for t in found] == [torch.float32] * 4 + [torch.bool]
    assert found.log_probs.requires_grad and not any(t.requires_grad for t in found[1:])
    asked = op(**given, **others, entropy=True, **EXTRAS)
    assert torch.equal(asked.log_probs, found.log_probs)
    assert [t.shape for t in asked] == [(3, 5, 2), (3, 5), (3, 5), (3, 5), (3, 5, 2)]
    assert [t.requires_grad for t in asked] == [True, True, False, False, False]


@pytest.mark.parametrize("frozen", ["", "weight bias"])
@pytest.mark.parametrize("ids", [None, 3])
def test_ignored_positions_are_zero_whatever_they_hold(ids, frozen, device):
    given, others = of_log_probs(((8,), 8, 20), torch.float32, device, ids=ids, bias=True, frozen=frozen)
    given["input"].data[::4] = math.nan
    others["target"][::4] = -100
    others["target"][1] = 0
    found = with_sums(**given, **others, entropy=True, **EXTRAS)
    assert not any(t[::4].any() for t in found)
    (slope,) = torch.autograd.grad(
        found.log_probs.sum() + found.entropy.sum() + found.log_sum_exp.sum(), given["input"]
    )
    assert not slope[::4].any() and slope[1].any()


def test_confident_predictions_keep_their_digits(device):
    """d input of a frozen head is tiny where the id is nearly certain: a difference of large terms would round it."""
    given, _ = of_log_probs(((16,), 32, 50), torch.bfloat16, device, frozen="weight")
    given["input"].data *= 8
    target = (given["input"].detach().double() @ given["weight"].double().t()).argmax(-1)
    for ids in (target, torch.stack([target, (target + 1) % 50], 1)):
        check(op, given, device, target=ids)


@pytest.mark.parametrize("frozen", ["", "weight"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 60.0])
def test_gradients_do_not_round_logits(softcap, dtype, frozen, device):
    """Of bf16 logits near 30, the probability of a nearly certain id would be off by 6 %, and its gradient by many times its
    size."""
    given, _ = of_log_probs(((64,), 32, 400), dtype, device, frozen=frozen)
    given["input"].data *= 6
    target = (given["input"].detach().double() @ given["weight"].double().t()).argmax(-1)

    x, weight = (given[name].detach().double() for name in ("input", "weight"))
    z = (x @ weight.t()).requires_grad_()
    v = z if softcap is None else softcap * torch.tanh(z / softcap)
    v.log_softmax(-1).gather(-1, target[:, None]).sum().backward()
    exact = z.grad @ weight
    certain = 10 * exact.abs().amax(1) < exact.abs().max()
    assert certain.sum() > 5

    op(**given, target=target, softcap=softcap).log_probs.sum().backward()
    # Gradients of logits and the result are rounded, on a GPU also logits relative to a larger one. fp32 rounds logits.
    far = 1 + (z.amax(1, True) - z if device == "cuda" else 0)
    p = v.softmax(-1)
    sizes = torch.finfo(dtype).eps * far * z.grad.abs() + 16 * torch.finfo(torch.float32).eps * z.abs().amax() * p
    allowed = (sizes + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps) @ weight.abs()
    assert ((given["input"].grad.double() - exact).abs() <= allowed).all()


# ---- Cost


def multiplications(step):
    """The sum of all GEMMs of a step, in multiplications."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    total = 0
    for event in profile.events():
        if event.name in ("aten::mm", "aten::addmm"):
            a, b = event.input_shapes[:2] if event.name == "aten::mm" else event.input_shapes[1:3]
            total += a[0] * a[1] * b[1]
    return total


# Frozen parts of the head, options, the results that have an upstream gradient, and the number of GEMMs.
PRODUCTS = {
    "no gradient": ("input weight", {}, 0, 1),
    "frozen head": ("weight", {}, 1, 2),
    "frozen head, entropy logged": ("weight", dict(entropy=True), 1, 2),
    "frozen head, entropy announced": ("weight", dict(entropy=True, entropy_grad=True), 2, 3),
    "frozen head, entropy not announced": ("weight", dict(entropy=True), 2, 4),
    "frozen input": ("input", dict(entropy=True), 2, 3),
    "all": ("", dict(entropy=True), 2, 4),
}


@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("ids", [None, 3])
@pytest.mark.library
def test_number_of_products(ids, case):
    frozen, options, upstream, products = PRODUCTS[case]
    given, others = of_log_probs(((64,), 16, 300), torch.float32, "cpu", ids=ids, frozen=frozen)

    def step():
        found = op(**given, **others, **options, memory_budget=40000)[:upstream]
        return sum(r.sum() for r in found).backward() if found else found

    assert multiplications(step) == products * 64 * 16 * 300


@pytest.mark.library
def test_a_frozen_head_saves_one_product():
    given, others = of_log_probs(((20,), 8, 30), torch.float32, "cpu", frozen="weight")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        op(**given, **others, entropy=True, entropy_grad=True)
    assert sorted(tuple(s.shape) for s in saved if s.dim() > 1) == [(20, 8), (20, 8)]
    assert all(s.data_ptr() not in [t.data_ptr() for t in given.values()] for s in saved)


@pytest.mark.library
def test_a_budget_too_small_for_backward_is_refused_by_forward(device):
    """The sums of tiny heads need more than their logits."""
    given, others = of_log_probs(((4,), 512, 5), torch.bfloat16, device)
    least = least_budget(op, **given, **others)
    assert least > 2000
    op(**given, **others, memory_budget=least).log_probs.sum().backward()
    op(**{name: t.detach() for name, t in given.items()}, **others, memory_budget=2000)


# ---- Errors


X, W, Y = torch.ones(2, 8), torch.ones(5, 8), torch.zeros(2, dtype=torch.long)
ERRORS = {
    "weight must have the dtype of input, BFloat16": lambda: op(X.bfloat16(), W, Y),
    "weight must have the dtype of input, Float, or be float16 or bfloat16": lambda: op(X, W.double(), Y),
    r"target must have shape \[2\], or that with one dimension more": lambda: op(X, W, Y[:1]),
    "temperature must be positive and finite": lambda: op(X, W, Y, temperature=-1.0),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.library
def test_errors(message):
    with pytest.raises(RuntimeError, match=rf"^fused_linear_log_probs: {message}.*\(got "):
        ERRORS[message]()
