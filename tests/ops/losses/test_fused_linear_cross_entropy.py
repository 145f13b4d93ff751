"""fused_linear_cross_entropy and its forms with metrics and log-probabilities: what test_linear_losses.py does not cover."""

from functools import partial

import pytest
import torch
import torch.nn.functional as nnf

from liger_ops import functional as F
from liger_ops.nn import FusedLinearCrossEntropyLoss
from tests.support.checks import (
    CPU_DTYPES,
    HALF_TYPES,
    assert_no_worse,
    assert_no_worse_overall,
    check_no_synchronization,
    check_replays,
    equal,
    gradients,
    like,
    path_taken,
    roundings,
)
from tests.support.families import linear_losses
from tests.support.families.linear_losses import (
    BITS,
    CE_OPTIONS,
    budget_for,
    check,
    head,
    of_cross_entropy,
    plan,
    plan_of,
    small_budget,
)
from tests.support.pairs import pairwise

flce = F.fused_linear_cross_entropy
with_metrics = F.fused_linear_cross_entropy_with_metrics
with_log_probs = F.fused_linear_cross_entropy_with_log_probs
BOTH = BITS["input"] | BITS["weight"]


def logits_of(input, weight, bias=None, low_rank_input=None, low_rank_weight=None, dtype=torch.float32):
    tensors = (input, weight, bias, low_rank_input, low_rank_weight)
    x, w, b, t, u = (None if t is None else t.detach().to(dtype) for t in tensors)
    logits = nnf.linear(x, w, b)
    return logits if t is None else logits + t @ u.T


# ---- Accuracy


@pytest.mark.thorough
@pairwise(bias=[False, True], confident=[False, True], chunks=[2, 4, 16], dtype=HALF_TYPES)
def test_chunked_gradients_are_as_accurate_as_one_gemm(bias, confident, chunks, dtype, device):
    """Accuracy does not depend on the number of chunks. Confident predictions leave small gradients, which would show
    logits that were rounded before the bias was added."""
    given, others = of_cross_entropy(((2048,), 64, 2000), dtype, device, bias=bias, ignored=0.0)
    with torch.no_grad():
        given["weight"] /= 2
        if confident:
            given["input"][:1400] *= 0.3
            given["input"][:1400] += 8 * given["weight"][others["target"][:1400]]
    budget = budget_for(chunks, given)
    assert chunks // 2 < plan_of(given, budget=budget)[1] <= chunks

    def eager(*tensors):
        return nnf.cross_entropy(nnf.linear(*tensors).float(), others["target"])

    def exact(*tensors):
        return nnf.cross_entropy(nnf.linear(*tensors), others["target"])

    grad, tensors = [torch.ones((), device=device)], [*given.values()]
    call = lambda *t: flce(**dict(zip(given, t)), **others, memory_budget=budget)  # noqa: E731
    ours, theirs = gradients(call, tensors, grad), gradients(eager, [like(t) for t in tensors], grad)
    oracle = gradients(exact, [like(t, torch.float64) for t in tensors], grad)
    for mine, other, truth in zip(ours[1:], theirs[1:], oracle[1:]):
        assert_no_worse("the largest error", mine, other, truth)
        assert_no_worse_overall([mine], [other], [truth])


# ---- Metrics, log-probabilities


@pairwise(
    dtype=CPU_DTYPES, adapter=[None, "same", torch.float32], reduction=["mean", "sum", "none"], options=CE_OPTIONS,
)  # fmt: skip
def test_metrics_equal_those_of_cross_entropy(dtype, adapter, reduction, options, device):
    given, others = of_cross_entropy(((3, 20), 32, 1000), dtype, device, reduction, options, bias=True, adapter=adapter)
    budget = small_budget(with_metrics, **given, **others)
    ours = with_metrics(**given, **others, memory_budget=budget)
    assert ours.loss.requires_grad and not any(t.requires_grad for t in ours[1:])
    with torch.no_grad():
        quiet = with_metrics(**given, **others)
    torch.testing.assert_close([*quiet], [t.detach() for t in ours])
    torch.testing.assert_close(ours.loss, flce(**given, **others))
    logits = logits_of(**given) * others.pop("logits_scale", 1.0)
    counted = others["target"] != -100
    if dtype == torch.float32:
        for mine, expected in zip(ours, F.cross_entropy_with_metrics(logits, **others)):
            torch.testing.assert_close(mine.detach(), expected)
    else:
        # Equal after rounding, another class may be first.
        best = logits.gather(-1, ours.predicted_tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        noise = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(best[counted], logits.amax(-1)[counted], rtol=noise, atol=noise)


@pairwise(classes=[2560, 5003, 9001, 20000, 70001], reduction=["none", "mean"], dtype=[torch.float32, torch.bfloat16])
def test_predictions_over_many_classes(classes, reduction, dtype, device):
    """The largest logit occurs twice, at varying positions; the first occurrence is predicted."""
    x = torch.zeros(6, 16, device=device, dtype=dtype).fill_diagonal_(1).requires_grad_()
    weight = torch.zeros(classes, 16, device=device, dtype=dtype)
    last = classes - 1
    places = [(3, 40), (last, 700), (1500, last - 1), (2300, 2301), (last, last - 1), (0, classes // 2)]
    for row, (one, other) in enumerate(places):
        weight[one, row] = weight[other, row] = 4
    target = torch.tensor([40, 5, 1500, 7, last, 0], device=device)
    with path_taken(device):
        loss, _, accuracy, predicted = with_metrics(x, weight.requires_grad_(), target, reduction=reduction)
    assert predicted.tolist() == [min(pair) for pair in places]
    right = torch.tensor([0, 0, 1, 0, 0, 1], device=device, dtype=accuracy.dtype)
    assert torch.equal(accuracy, right if reduction == "none" else right.mean())
    formula = partial(nnf.cross_entropy, target=target, reduction=reduction)
    logits = logits_of(x, weight)
    bounds = roundings(formula, [logits], [], [formula(logits.double())])
    assert_no_worse("loss", loss, formula(logits), formula(logits.double()), bounds=(bounds, 0))


@pairwise(reduction=["mean", "none"], classes=[40, 1001, 9000], softcap=[None, 5.0], adapter=[None, "same"])
def test_log_probs_and_entropy(reduction, classes, softcap, adapter, device):
    given, others = of_cross_entropy(((3, 20), 32, classes), torch.float32, device, reduction, adapter=adapter)
    target = others["target"]
    with torch.no_grad():
        given["input"][0] += 20 * given["weight"][target[0].clamp(min=0)]
    others |= dict(softcap=softcap, logits_scale=1.5)
    budget = small_budget(with_log_probs, **given, **others)
    with path_taken(device):
        loss, log_probs, entropy = with_log_probs(**given, **others, memory_budget=budget)

    def expected(dtype):
        logits = 1.5 * logits_of(**given, dtype=dtype)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        p = logits.log_softmax(-1)
        chosen = p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return torch.where(target == -100, 0, chosen), torch.where(target == -100, 0, -(p.exp() * p).sum(-1))

    for name, *results in zip(
        ("log_probs", "entropy"), (log_probs, entropy), expected(torch.float32), expected(torch.float64)
    ):
        assert_no_worse(name, *results)
    assert not log_probs.requires_grad and not entropy.requires_grad
    torch.testing.assert_close(loss, flce(**given, **others, memory_budget=budget))
    upstream, wanted = torch.randn(loss.shape, device=device).sign(), [*given.values()]
    mine = torch.autograd.grad(loss, wanted, upstream)
    torch.testing.assert_close(mine, torch.autograd.grad(flce(**given, **others), wanted, upstream))


def test_the_module_takes_an_addend():
    given = head((20,), 16, 50, torch.float32, "cpu", bias=True, adapter="same")
    target, loss = torch.randint(50, (20,)), FusedLinearCrossEntropyLoss(softcap=5.0)
    x, weight, bias, t, b = given.values()
    expected = flce(target=target, softcap=5.0, **given)
    for module in (loss, torch.jit.script(loss)):
        assert torch.equal(module(x, weight, target, bias, None, t, b), expected)


# ---- Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plan_keeps_the_budget(dtype):
    for tokens, hidden, classes in ((1, 8, 100), (4096, 4096, 128256), (16384, 4096, 128256), (999, 64, 50257)):
        for mib in (None, 2048, 256, 64):
            budget = None if mib is None else mib << 20
            chunk, chunks, workspace, grads = plan(tokens, hidden, classes, dtype, BOTH, budget)
            assert chunk * chunks >= tokens > chunk * (chunks - 1)
            assert workspace <= (budget or 1300 << 20)
            assert grads == (tokens + classes) * hidden * dtype.itemsize
    # This shape needs one chunk by default.
    assert plan(4096, 4096, 128256, torch.bfloat16, BOTH, None)[:2] == (4096, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [None, 256, 64])
@pytest.mark.parametrize("frozen", ["", "weight", "input weight"])
def test_peak_memory_matches_the_plan(frozen, mib):
    given, others = of_cross_entropy(((4096,), 1024, 128256), torch.bfloat16, "cuda", frozen=frozen)
    budget = None if mib is None else mib << 20
    *_, workspace, grads = plan_of(given, budget=budget)
    wanted = [t for t in given.values() if t.requires_grad]

    def step():
        loss = flce(**given, **others, memory_budget=budget)
        return torch.autograd.grad(loss, wanted) if wanted else loss

    step()  # allocates the workspace of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    peak = torch.cuda.max_memory_allocated() - before
    assert kept is not None and peak == pytest.approx(workspace + grads, rel=0.05)


# ---- The order of tokens by target, in which a class's gradients are accumulated


# Up to 16384 tokens, all pairs of targets are compared; more are sorted.
TOKENS_TO_ORDER = [200, 8200, 16400]


@pytest.mark.gpu
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", TOKENS_TO_ORDER)
def test_targets_are_ordered(tokens, target_dtype):
    given, others = of_cross_entropy(((tokens,), 16, 200), torch.bfloat16, "cuda")
    others["target"] = others["target"].to(target_dtype)
    budget = budget_for(6, given)
    assert plan_of(given, budget=budget)[1] > 1
    check(flce, given, "cuda", **others, memory_budget=budget)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS_TO_ORDER)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_no_synchronization_and_cuda_graph_capture(dtype, reduction, tokens):
    given, others = of_cross_entropy(((tokens,), 64, 1000), dtype, "cuda", reduction)
    call = lambda *t: flce(**dict(zip(given, t)), **others, memory_budget=budget_for(6, given))  # noqa: E731
    grad = torch.full((tokens,) if reduction == "none" else (), 3.0, device="cuda")

    def step():
        # Detach: a live autograd graph would tie the next step to this step's stream.
        return [t.detach() for t in gradients(call, [*given.values()], [grad])]

    expected = check_no_synchronization(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert equal(step(), expected)
    torch.cuda.synchronize()
    check_replays(step, expected)


# ---- Errors


X, W, Y = torch.ones(2, 3, 8), torch.ones(10, 8), torch.zeros(2, 3, dtype=torch.int64)
ERRORS = {
    "target of another shape": (dict(target=Y[:1]), r"target must have shape \[2, 3\]"),
    "parts of classes alone": (dict(class_sizes=[10]), "class_sizes must be None without a group"),
    "a part of a sequence alone": (dict(sequence_dim=0), "sequence_dim must be None without a group"),
    "integer token weights": (dict(token_weight=Y), "token_weight must be floating point"),
}


@pytest.mark.parametrize("op", [flce, with_metrics, with_log_probs])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, op):
    changes, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=rf"^{op.__name__}: {message}.*\(got "):
        op(**dict(input=X, weight=W, target=Y) | changes)


# For test_properties.py.
noise, precision = linear_losses.noise, linear_losses.precision
