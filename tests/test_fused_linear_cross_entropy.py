import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from strategies import may_be_float32
from support import (
    CPU_DTYPES,
    HALF_TYPES,
    OPCHECKS,
    assert_no_worse,
    check_deterministic,
    check_inductor,
    check_no_double_backward,
    check_one_graph,
    check_reads_only,
    check_second_backward,
    coarseness,
    equal,
    gradients,
    interpret,
    like,
    output_of,
    path_taken,
)
from torch import Tensor

import liger_ops

flce = torch.ops.liger.fused_linear_cross_entropy
with_metrics = torch.ops.liger.fused_linear_cross_entropy_with_metrics
with_log_probs = torch.ops.liger.fused_linear_cross_entropy_with_log_probs
plan = torch.ops.liger._fused_linear_cross_entropy_plan
cross_entropy_with_metrics = torch.ops.liger.cross_entropy_with_metrics

# Bits of what a call wants, as the private ops take them.
INPUT, WEIGHT, BIAS = 4, 8, 16


def logits_of(x, weight, bias=None, logits_scale=1.0):
    logits = F.linear(x, weight, bias)
    return logits if logits_scale == 1 else logits * logits_scale


def reference(
    x, weight, target, bias=None, ce_weight=None, reduction="mean", ignore_index=-100, label_smoothing=0.0,
    lse_square_scale=0.0, softcap=None, logits_scale=1.0, token_weight=None, memory_budget=None,
):  # fmt: skip
    logits = logits_of(x, weight, bias, logits_scale)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, weight.shape[0])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    y = target.reshape(-1).long()
    counted = y != ignore_index
    ce_weight = None if ce_weight is None else ce_weight.to(logits.dtype)
    loss = F.cross_entropy(logits, y, ce_weight, None, ignore_index, None, "none", label_smoothing)
    z_loss = torch.where(counted, lse_square_scale * torch.logsumexp(logits, -1).square(), 0)
    if token_weight is not None:
        loss, z_loss = (t * token_weight.reshape(-1).to(t.dtype) for t in (loss, z_loss))
    if reduction == "none":
        return (loss + z_loss).view(target.shape)
    if reduction == "sum":
        return (loss + z_loss).sum()
    of = torch.ones_like(loss) if ce_weight is None else ce_weight[y.clamp(min=0)]
    return loss.sum() / torch.where(counted, of, 0).sum() + z_loss.sum() / counted.sum()


def make(tokens, hidden, classes, dtype, device, bias=False, ignored=0.25):
    """Targets as language has them: a few classes take most."""
    tokens = (tokens,) if isinstance(tokens, int) else tokens
    x = torch.randn(*tokens, hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, hidden, device=device) * hidden**-0.5).to(dtype).requires_grad_()
    target = (torch.rand(tokens, device=device) ** 3 * classes).long()
    target[torch.rand(tokens, device=device) < ignored] = -100
    b = torch.randn(classes, device=device).to(dtype).requires_grad_() if bias else None
    return x, weight, target, b


def budget_for(chunks, inputs, wanted=INPUT | WEIGHT):
    """The smallest budget that needs no more than so many chunks."""
    x, weight = inputs[0], inputs[1]
    sizes = (x.numel() // max(x.shape[-1], 1), x.shape[-1], weight.shape[0], x.dtype, wanted)
    low, high = 1, 1 << 32
    while low < high:
        middle = (low + high) // 2
        try:
            few = plan(*sizes, middle)[1] <= chunks
        except RuntimeError:
            few = False
        low, high = (low, middle) if few else (middle + 1, high)
    return low


def check(inputs, device, grad=None, **options):
    ours_of, expected = partial(flce, **options), partial(reference, **options)
    loss = expected(*[t if t is None else t.detach() for t in inputs])
    # A gradient made in forward is rounded before its upstream is known: powers of two add no rounding of their own.
    upstream = torch.randn(loss.shape, device=device) if loss.dim() else torch.tensor(-2.0, device=device)
    with path_taken(device):
        ours = gradients(ours_of, [like(t) for t in inputs], [upstream])
    eager = gradients(expected, [like(t) for t in inputs], [upstream])
    doubled = dict(options)
    for name in ("token_weight", "ce_weight"):
        if doubled.get(name) is not None:
            doubled[name] = doubled[name].double()
    exact = [like(t, torch.float64) for t in inputs]
    oracle = gradients(partial(reference, **doubled), exact, [upstream])
    assert_no_worse("loss", ours[0], eager[0], oracle[0], noise=noise_of(exact, inputs[0].dtype, doubled))
    named = zip(("input", "weight", "target", "bias"), inputs)
    wanted = [name for name, t in named if t is not None and t.requires_grad]
    for name, mine, theirs, truth in zip(wanted, ours[1:], eager[1:], oracle[1:], strict=True):
        # The largest of many errors is a matter of luck too, within what they are on average.
        noise = 3 * usual_error(theirs, truth)
        if device == "cuda" and mine.dtype == torch.float32:
            # Kernels' exponentials are within 2 ulp, eager's within 1.
            noise += torch.finfo(torch.float32).eps
        assert_no_worse(name, mine, theirs, truth, noise=noise)
        if name != "input" and mine.dtype in HALF_TYPES:
            check_untargeted(name, inputs, mine, theirs, truth, chunks_of(inputs, wanted, options.get("memory_budget")))
    return ours


def usual_error(result, truth) -> float:
    """As distance() has it, of the mean element."""
    if truth.numel() == 0:
        return 0.0
    return float((result.double() - truth).square().mean().sqrt() / truth.abs().max().clamp(min=1e-30))


def chunks_of(inputs, wanted, budget) -> int:
    x, weight, target = inputs[:3]
    bits = sum({"input": INPUT, "weight": WEIGHT, "bias": BIAS}[name] for name in wanted)
    return plan(target.numel(), x.shape[-1], len(weight), x.dtype, bits, budget)[1]


def check_untargeted(name, inputs, ours, eager, oracle, chunks):
    """Beside classes that are somebody's target, zeros would pass for the gradient of the others. Their rows are
    rounded once a chunk."""
    target = inputs[2].flatten().long()
    known = target[(target >= 0) & (target < len(inputs[1]))]
    untargeted = torch.ones(len(oracle), dtype=torch.bool, device=oracle.device).index_fill(0, known, False)
    results = [t[untargeted] for t in (ours, eager, oracle)]
    noise = 3 * usual_error(*results[1:]) + chunks * torch.finfo(ours.dtype).eps / 2
    assert_no_worse(f"{name} of untargeted classes", *results, noise=noise + coarseness(ours.dtype, results[2]))


@torch.no_grad()
def noise_of(exact, dtype, options) -> float:
    """Three standard deviations of what the rounding of logits to `dtype` does to the loss, relative to it. One token's
    error, or the sum of many, may come out small by luck, in eager's or in ours: that is no measure of either."""
    truth = reference(*exact, **{**options, "reduction": "none"})
    if not truth.any():
        return 0.0
    error = torch.finfo(dtype).eps * float(logits_of(exact[0], exact[1], *exact[3:4]).abs().max())
    if options.get("reduction") == "none":
        return error / float(truth.abs().max())
    return error * truth.numel() ** 0.5 / float(truth.sum().abs())


# ---- Values


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize(
    "tokens, hidden, classes", [(1, 8, 2), (5, 16, 40), (70, 64, 1000), (130, 24, 1001), (33, 7, 61)]
)
@pytest.mark.parametrize("chunks", [1, 3])
def test_sizes(chunks, tokens, hidden, classes, dtype, device):
    inputs = make(tokens, hidden, classes, dtype, device, bias=True, ignored=0.1 if tokens > 1 else 0)
    check(inputs, device, memory_budget=budget_for(chunks, inputs, INPUT | WEIGHT | BIAS))


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [32000, 50257, 128256, 151936, 262144])
def test_vocabularies(classes):
    inputs = make(300, 256, classes, torch.bfloat16, "cuda")
    for chunks in (1, 4):
        check(inputs, "cuda", memory_budget=budget_for(chunks, inputs))


OPTIONS = {
    "plain": {},
    "smoothing": dict(label_smoothing=0.1),
    "z_loss": dict(lse_square_scale=1e-3),
    "softcap": dict(softcap=5.0),
    "scale": dict(logits_scale=0.7),
    "all": dict(label_smoothing=0.1, lse_square_scale=1e-3, softcap=5.0, logits_scale=1.5),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", ["", "classes", "tokens", "classes and tokens"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_options(dtype, reduction, weighted, options, device):
    inputs = make((3, 30), 32, 200, dtype, device, bias=True)
    arguments = dict(OPTIONS[options], reduction=reduction)
    if "classes" in weighted:
        arguments["ce_weight"] = torch.rand(200, device=device) + 0.1
    if "tokens" in weighted:
        arguments["token_weight"] = torch.rand(3, 30, device=device)
    check(inputs, device, **arguments, memory_budget=budget_for(2, inputs, INPUT | WEIGHT | BIAS))


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ignore_index", [-100, 0, 5])
def test_targets(ignore_index, target_dtype, device):
    x, weight, target, _ = make(50, 16, 40, torch.bfloat16, device)
    target = torch.where(target == -100, ignore_index, target).to(target_dtype)
    check((x, weight, target), device, ignore_index=ignore_index, memory_budget=budget_for(3, (x, weight)))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_target_at_all(reduction, dtype, device):
    x, weight, target, bias = make(6, 16, 40, dtype, device, bias=True, ignored=1.0)
    loss = flce(x, weight, target, bias, None, reduction)
    assert loss.isnan().all() if reduction == "mean" else not loss.any()
    for gradient in torch.autograd.grad(loss.sum(), (x, weight, bias)):
        assert not gradient.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_no_tokens(shape, reduction, device):
    x, weight, target, bias = make(shape, 16, 40, torch.bfloat16, device, bias=True)
    ours = gradients(
        partial(flce, reduction=reduction),
        (x, weight, target, bias),
        [torch.ones((), device=device)] if reduction != "none" else [torch.ones(shape, device=device)],
    )
    assert ours[0].shape == (() if reduction != "none" else shape)
    assert ours[0].isnan() if reduction == "mean" else not ours[0].any()
    assert ours[1].shape == x.shape and not ours[2].any() and not ours[3].any()


def test_one_token_without_leading_dimension(device):
    x, weight, target, _ = make((), 16, 40, torch.float32, device, ignored=0)
    check((x, weight, target), device)


@pytest.mark.parametrize("dtype", HALF_TYPES)
@pytest.mark.parametrize("chunks", [2, 4, 16])
@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_as_accurate_as_one_product(bias, confident, chunks, dtype, device):
    """However many chunks it is the sum of. Also where most is predicted well and little gradient is left: it tells
    logits that were rounded before their bias was added from those that were rounded once."""
    x, weight, target, _ = inputs = make(2048, 64, 2000, dtype, device, bias=bias, ignored=0.0)
    wanted = INPUT | WEIGHT | (BIAS if bias else 0)
    if confident:
        with torch.no_grad():
            x[:1400] = 0.3 * x[:1400] + 8 * weight[target[:1400]]
    budget = budget_for(chunks, inputs, wanted)
    assert chunks // 2 < plan(2048, 64, 2000, dtype, wanted, budget)[1] <= chunks
    ours = gradients(partial(flce, memory_budget=budget), inputs, [torch.ones((), device=device)])
    eager = gradients(reference, [like(t) for t in inputs], [torch.ones((), device=device)])
    oracle = gradients(reference, [like(t, torch.float64) for t in inputs], [torch.ones((), device=device)])
    for mine, theirs, truth in zip(ours[1:], eager[1:], oracle[1:]):
        for norm in (math.inf, 2):
            error, allowed = (torch.linalg.vector_norm(t.double() - truth, norm) for t in (mine, theirs))
            assert error <= 1.5 * allowed


def test_small_gradients_survive_fp16(device):
    """A mean over many tokens divides by a number that fp16's range does not hold together with a probability."""
    x, weight, target, _ = inputs = make(4096, 16, 4000, torch.float16, device, ignored=0.0)
    ours = gradients(flce, inputs, [torch.tensor(4096.0, device=device)])
    oracle = gradients(reference, [like(t, torch.float64) for t in inputs], [torch.tensor(4096.0, device=device)])
    for mine, truth in zip(ours[1:], oracle[1:]):
        error = torch.linalg.vector_norm(mine.double() - truth) / torch.linalg.vector_norm(truth)
        assert error < torch.finfo(torch.float16).eps


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "x bias", "weight bias", ""])
def test_only_wanted_gradients(wanted, dtype, reduction, device):
    x, weight, target, bias = inputs = make(60, 16, 100, dtype, device, bias=True)
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        t.requires_grad_(name in wanted.split())
    ours = check(inputs, device, reduction=reduction, memory_budget=budget_for(3, inputs, INPUT))
    assert ours[0].requires_grad == bool(wanted)


@pytest.mark.parametrize("weight_layout", ["contiguous", "transposed", "part of a larger one", "every other column"])
@pytest.mark.parametrize(
    "input_layout", ["contiguous", "transposed", "shifted", "part of wider rows", "every other column"]
)
def test_layouts(input_layout, weight_layout, device):
    x, weight, target, _ = make((4, 9), 16, 100, torch.bfloat16, device)
    x, weight = x.detach(), weight.detach()
    x = {
        "contiguous": lambda: x,
        "transposed": lambda: x.transpose(0, 1).contiguous().transpose(0, 1),
        "shifted": lambda: torch.cat([x, x[:, :1]], 1)[:, :-1],
        "part of wider rows": lambda: torch.cat([x, x], -1)[..., :16],
        "every other column": lambda: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    }[input_layout]()
    weight = {
        "contiguous": lambda: weight,
        "transposed": lambda: weight.t().contiguous().t(),
        "part of a larger one": lambda: torch.cat([weight, weight])[:100],
        "every other column": lambda: torch.stack([weight, weight], -1).flatten(-2)[..., ::2],
    }[weight_layout]()
    leaves = (x.requires_grad_(), weight.requires_grad_(), target)
    ours = check(leaves, device, memory_budget=budget_for(3, leaves))
    assert ours[2].stride() == torch.empty_like(weight).stride()


def test_tied_embeddings(device):
    embedding = torch.randn(100, 16, device=device).requires_grad_()
    target = torch.randint(100, (40,), device=device)
    losses = [op(F.embedding(target.roll(1), embedding), embedding, target) for op in (flce, reference)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, embedding)[0] for loss in losses))


# ---- Metrics, log-probabilities


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_metrics_are_those_of_cross_entropy(reduction, options, device):
    x, weight, target, bias = make((3, 20), 32, 1000, torch.float32, device, bias=True)
    arguments = dict(OPTIONS[options], reduction=reduction)
    ours = with_metrics(x, weight, target, bias, **arguments, memory_budget=budget_for(3, (x, weight), 31))
    scale = arguments.pop("logits_scale", 1.0)
    theirs = cross_entropy_with_metrics(logits_of(x, weight, bias, scale), target, **arguments)
    for mine, expected in zip(ours, theirs):
        torch.testing.assert_close(mine, expected)
    assert ours[0].requires_grad and not any(t.requires_grad for t in ours[1:])
    with torch.no_grad():
        quiet = with_metrics(x, weight, target, bias, **OPTIONS[options], reduction=reduction)
    for mine, expected in zip(quiet, theirs):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("classes", [2560, 5003, 9001, 20000, 70001])
def test_predictions_over_many_classes(classes, reduction, dtype, device):
    """Two of the largest logits are equal, wherever a program keeps them; the first is what is predicted."""
    x = torch.zeros(6, 16, device=device, dtype=dtype).fill_diagonal_(1).requires_grad_()
    weight = torch.zeros(classes, 16, device=device, dtype=dtype)
    places = [
        (3, 40),
        (classes - 1, 700),
        (1500, classes - 2),
        (2300, 2301),
        (classes - 1, classes - 2),
        (0, classes // 2),
    ]
    for row, (one, other) in enumerate(places):
        weight[one, row] = weight[other, row] = 4
    target = torch.tensor([40, 5, 1500, 7, classes - 1, 0], device=device)
    with path_taken(device):
        loss, _, accuracy, predicted = with_metrics(x, weight.requires_grad_(), target, None, None, reduction)
    assert predicted.tolist() == [min(pair) for pair in places]
    right = torch.tensor([0, 0, 1, 0, 0, 1], device=device, dtype=accuracy.dtype)
    assert torch.equal(accuracy, right if reduction == "none" else right.mean())
    expected = torch.nn.functional.cross_entropy(logits_of(x, weight, None, 1.0).double(), target, reduction=reduction)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("classes", [40, 1001, 9000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_log_probs_and_entropy(reduction, classes, softcap, device):
    x, weight, target, _ = make((3, 20), 32, classes, torch.float32, device)
    with torch.no_grad():
        x[0] += 20 * weight[target[0].clamp(min=0)]
    arguments = dict(softcap=softcap, logits_scale=1.5, reduction=reduction)
    with path_taken(device):
        loss, log_probs, entropy = with_log_probs(
            x, weight, target, **arguments, memory_budget=budget_for(3, (x, weight))
        )

    def expected(dtype):
        logits = logits_of(x.to(dtype), weight.to(dtype), None, 1.5)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        p = logits.log_softmax(-1)
        chosen = p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
        return torch.where(target == -100, 0, chosen), torch.where(target == -100, 0, -(p.exp() * p).sum(-1))

    for name, *results in zip(
        ("log_probs", "entropy"), (log_probs, entropy), expected(torch.float32), expected(torch.float64)
    ):
        assert_no_worse(name, *results)
    assert torch.equal(loss, flce(x, weight, target, **arguments, memory_budget=budget_for(3, (x, weight))))
    assert not log_probs.requires_grad and not entropy.requires_grad
    upstream = torch.randn(loss.shape, device=device).sign()
    mine = torch.autograd.grad(loss, (x, weight), upstream)
    theirs = torch.autograd.grad(flce(x, weight, target, **arguments), (x, weight), upstream)
    torch.testing.assert_close(mine, theirs)


# ---- Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plan_keeps_the_budget(dtype):
    for tokens, hidden, classes in ((1, 8, 100), (4096, 4096, 128256), (16384, 4096, 128256), (999, 64, 50257)):
        for mib in (None, 2048, 256, 64):
            budget = None if mib is None else mib << 20
            chunk, chunks, workspace, grads = plan(tokens, hidden, classes, dtype, INPUT | WEIGHT, budget)
            assert chunk * chunks >= tokens > chunk * (chunks - 1)
            assert workspace <= (budget or 1300 << 20)
            assert grads == (tokens + classes) * hidden * dtype.itemsize
    # The paper's shape at its default: one product each.
    assert plan(4096, 4096, 128256, torch.bfloat16, INPUT | WEIGHT, None)[:2] == (4096, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [None, 256, 64])
@pytest.mark.parametrize("needs", ["both", "input", "nothing"])
def test_peak_memory_is_what_the_plan_says(needs, mib):
    tokens, hidden, classes = 4096, 1024, 128256
    x, weight, target, _ = make(tokens, hidden, classes, torch.bfloat16, "cuda")
    x.requires_grad_(needs != "nothing")
    weight.requires_grad_(needs == "both")
    budget = None if mib is None else mib << 20
    wanted = (INPUT if needs != "nothing" else 0) | (WEIGHT if needs == "both" else 0)
    _, _, workspace, grads = plan(tokens, hidden, classes, torch.bfloat16, wanted, budget)

    def step():
        loss = flce(x, weight, target, memory_budget=budget)
        return torch.autograd.grad(loss, [t for t in (x, weight) if t.requires_grad]) if wanted else loss

    step()  # the workspace of cuBLAS is made once and stays
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    peak = torch.cuda.max_memory_allocated() - before
    assert kept is not None and peak == pytest.approx(workspace + grads, rel=0.05)


def test_what_arrives_scales_the_gradients(device):
    x, weight, target, _ = make(50, 16, 40, torch.float32, device)
    ones = torch.autograd.grad(flce(x, weight, target), (x, weight))
    halves = torch.autograd.grad(flce(x, weight, target), (x, weight), torch.tensor(-0.5, device=device))
    assert all(torch.equal(half, one * -0.5) for half, one in zip(halves, ones))


def test_inputs_are_not_written(device):
    check_reads_only(flce, make(50, 16, 40, torch.bfloat16, device, bias=True), [torch.tensor(3.0, device=device)])


def test_second_backward(device):
    for reduction, grad in (("mean", torch.tensor(3.0, device=device)), ("none", torch.randn(50, device=device))):
        inputs = make(50, 16, 40, torch.float16, device, bias=True)
        check_second_backward(partial(flce, reduction=reduction), inputs, [grad])


def test_double_backward_is_refused(device):
    inputs = make(50, 16, 40, torch.float32, device)[:3]
    check_no_double_backward("fused_linear_cross_entropy", flce, inputs, [torch.tensor(2.0, device=device)])


@pytest.mark.parametrize("name", ["input", "weight", "bias", "ce_weight", "token_weight"])
def test_forward_mode_is_refused(name):
    x, weight, target, bias = (t if t is None else t.detach() for t in make(5, 8, 10, torch.float32, "cpu", bias=True))
    arguments = dict(input=x, weight=weight, bias=bias, ce_weight=torch.ones(10), token_weight=torch.ones(5))
    with torch.autograd.forward_ad.dual_level():
        arguments[name] = torch.autograd.forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(RuntimeError, match="forward-mode automatic differentiation is not supported"):
            flce(target=target, **arguments)


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
def test_no_hidden_columns(shape, device):
    """Logits of nothing are all alike."""
    x, weight = (torch.zeros(*s, 0, device=device, requires_grad=True) for s in (shape, (5,)))
    loss = flce(x, weight, torch.zeros(shape, dtype=torch.long, device=device))
    torch.testing.assert_close(loss, torch.tensor(math.log(5.0), device=device))
    assert [g.shape for g in torch.autograd.grad(loss, [x, weight])] == [x.shape, weight.shape]


def test_checkpoint(device):
    x, weight, target, _ = make(50, 16, 40, torch.bfloat16, device)
    loss = torch.utils.checkpoint.checkpoint(flce, x, weight, target, use_reentrant=False)
    ours = torch.autograd.grad(loss, (x, weight))
    assert equal(ours, torch.autograd.grad(flce(x, weight, target), (x, weight)))


def test_runs_are_bitwise_equal(device):
    inputs = make(500, 64, 1000, torch.bfloat16, device, bias=True)
    for reduction, grad in (("mean", torch.tensor(3.0, device=device)), ("none", torch.randn(500, device=device))):
        check_deterministic(partial(flce, reduction=reduction, memory_budget=budget_for(4, inputs, 31)), inputs, [grad])


# ---- Transforms


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    x, weight, target, bias = make((2, 5), 3, 7, torch.float64, "cpu", bias=True)
    options = dict(label_smoothing=0.1, lse_square_scale=0.01, softcap=3.0, logits_scale=0.8)
    options |= dict(ce_weight=torch.rand(7).double(), token_weight=torch.rand(2, 5), memory_budget=1000)
    call = partial(flce, reduction=reduction, **options)
    torch.autograd.gradcheck(lambda x, w, b: call(x, w, target, b), (x, weight, bias))


@pytest.mark.parametrize("op", [flce, with_metrics, with_log_probs])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_opcheck(requires_grad, dtype, reduction, op, device):
    x, weight, target, bias = make((2, 9), 16, 40, dtype, device, bias=True)
    inputs = [t.detach().requires_grad_(requires_grad) for t in (x, weight)]
    torch.library.opcheck(op, (*inputs, target, bias.detach(), None, reduction), test_utils=OPCHECKS)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compile_makes_one_graph_for_all_sizes(reduction, device):
    def calls():
        for batch, length in ((2, 9), (3, 12), (5, 31)):
            grad = torch.randn((batch, length) if reduction == "none" else (), device=device)
            yield make((batch, length), 16, 40, torch.float32, device, bias=True), [grad]

    check_one_graph(partial(flce, reduction=reduction), calls())


def test_inductor(device):
    x, weight, target, _ = make((4, 9), 16, 40, torch.float32, device)
    check_inductor(lambda x, w: flce(x * 2, w, target), (x, weight), [torch.tensor(2.0, device=device)])


class Loss(torch.nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach())

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return torch.ops.liger.fused_linear_cross_entropy(x, self.weight, target)


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_op_and_the_batch_dynamic(strict, device):
    x, weight, target, _ = make((4, 9), 16, 40, torch.float32, device)
    module = Loss(weight)
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(
            module, (x.detach(), target), dynamic_shapes=({0: batch}, {0: batch}), strict=strict
        )
        others = make((7, 9), 16, 40, torch.float32, device)
        for exported in (program, program.run_decompositions()):
            targets = [n.target for n in exported.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
            assert targets == [flce.default]
            assert torch.equal(exported.module()(others[0].detach(), others[2]), module(others[0].detach(), others[2]))


def test_script(device, tmp_path):
    x, weight, target, _ = make((4, 9), 16, 40, torch.float32, device)
    module = Loss(weight)
    torch.jit.script(module).save(str(tmp_path / "loss.pt"))
    loaded = torch.jit.load(str(tmp_path / "loss.pt"))
    for m in (module, loaded):
        m.zero_grad()
        m(x, target).backward()
    assert torch.equal(module.weight.grad, loaded.weight.grad)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_meta(reduction):
    x, weight, target, bias = make((2, 5), 8, 20, torch.bfloat16, "meta", bias=True)
    loss, z_loss, accuracy, predicted = with_metrics(x, weight, target, bias, None, reduction)
    shape = () if reduction == "mean" else (2, 5)
    assert loss.shape == z_loss.shape == accuracy.shape == shape and loss.dtype == torch.float32
    assert predicted.shape == (2, 5) and predicted.dtype == torch.int64
    grads = torch.autograd.grad(loss.sum(), (x, weight, bias))
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]


def test_autocast(device):
    """Under autocast the product runs in the low precision, whatever the parameters' dtype, and they keep theirs."""
    x, weight, target, bias = make(50, 16, 40, torch.float32, device, bias=True)
    with torch.autocast(device, torch.bfloat16):
        loss = flce(x.to(torch.bfloat16), weight, target, bias)
    grads = torch.autograd.grad(loss, (x, weight, bias))
    low = [t.detach().to(torch.bfloat16).requires_grad_() for t in (x, weight, bias)]
    expected = flce(low[0], low[1], target, low[2])
    assert torch.equal(loss, expected)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, low)):
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs.float())


# ---- CUDA alone


# Targets are ordered by comparing all pairs up to 16384 tokens, and sorted beyond.
TOKENS_TO_ORDER = [200, 8200, 16400]


@pytest.mark.gpu
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens", TOKENS_TO_ORDER)
def test_targets_are_ordered(tokens, target_dtype):
    x, weight, target, _ = make(tokens, 16, 200, torch.bfloat16, "cuda")
    inputs = (x, weight, target.to(target_dtype))
    budget = budget_for(6, inputs)
    assert plan(tokens, 16, 200, torch.bfloat16, INPUT | WEIGHT, budget)[1] > 1
    check(inputs, "cuda", memory_budget=budget)


def check_replays(step, expected):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS_TO_ORDER)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_waits_for_the_device_and_a_graph_captures_it(dtype, reduction, tokens):
    inputs = make(tokens, 64, 1000, dtype, "cuda")[:3]
    call = partial(flce, reduction=reduction, memory_budget=budget_for(6, inputs))
    grad = torch.ones((tokens,) if reduction == "none" else (), device="cuda") * 3

    def step():
        # No graph outlives a step: autograd would tie the next to the stream of this one.
        return [t.detach() for t in gradients(call, inputs, [grad])]

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert equal(step(), expected)
    torch.cuda.synchronize()
    check_replays(step, expected)


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits():
    x, weight, target, _ = inputs = make(16400, 64, 131200, torch.bfloat16, "cuda")
    ours = gradients(partial(flce, memory_budget=6 << 30), inputs, [torch.ones((), device="cuda")])
    small = gradients(partial(flce, memory_budget=1 << 30), inputs, [torch.ones((), device="cuda")])
    for large, chunked in zip(ours, small):
        torch.testing.assert_close(large, chunked, rtol=0.02, atol=1e-3 * float(chunked.detach().abs().max()))


@pytest.mark.gpu
def test_a_target_out_of_range_makes_its_row_nan():
    x, weight, target, _ = make(10, 16, 40, torch.bfloat16, "cuda", ignored=0)
    target[3], target[7] = 40, -1
    loss = flce(x, weight, target, None, None, "none")
    assert loss.isnan().nonzero().flatten().tolist() == [3, 7]
    assert flce(x, weight, target, memory_budget=budget_for(3, (x, weight))).isnan()


@pytest.mark.gpu
def test_double_on_cuda_is_refused():
    x, weight, target, _ = make(4, 8, 10, torch.float64, "cuda")
    with pytest.raises(RuntimeError, match="input must be float32, float16 or bfloat16"):
        flce(x, weight, target)


# ---- Chunks whose logits nobody reads: bf16, large products, compute capability 9.0


def exponentials_made():
    return sum(json.loads(torch.ops.liger._status())["kernels"]["fused_linear_cross_entropy_exp_logits"]["launches"])


def has_exponentials():
    return torch.cuda.get_device_capability() == (9, 0)


def check_exponentials(inputs, chunks=1, **options):
    """check(), and that it ran where it should: two launches a chunk, of which the second finds nothing to do."""
    budget = budget_for(chunks, inputs) if chunks else None
    x, weight = inputs[:2]
    check(inputs, "cuda", memory_budget=budget, **options)
    made = plan(x.numel() // x.shape[-1], x.shape[-1], len(weight), x.dtype, INPUT | WEIGHT, budget)[1]
    assert made == (chunks or 1) and exponentials_made() == 2 * made * has_exponentials()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens, hidden, classes, chunks",
    [
        (2048, 512, 32768, 1),
        (2048, 512, 32768, 2),
        # Tiles that rows, classes and sums over hidden do not fill.
        (2500, 520, 33001, 1),
        (2500, 520, 33001, 2),
        (765, 1024, 65600, 1),
        # More sums than a row of the input's gradient has room for: without a budget.
        (8192, 64, 70001, None),
    ],
)
def test_exponentials(tokens, hidden, classes, chunks):
    check_exponentials(make(tokens, hidden, classes, torch.bfloat16, "cuda"), chunks)


@pytest.mark.gpu
def test_a_budget_is_kept_where_sums_have_no_room():
    inputs = make(2048, 512, 65536, torch.bfloat16, "cuda")
    with path_taken("cuda"):
        flce(*inputs, memory_budget=budget_for(1, inputs))
    assert exponentials_made() == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        "sum", "tokens", "classes", "z-loss", "classes, tokens and z-loss", "scale", "int32", "all ignored",
        "leading dimensions", "part of wider rows", "confident",
    ],
)  # fmt: skip
def test_exponentials_of_all_kinds(case):
    x, weight, target, _ = make((4, 500), 512, 49152, torch.bfloat16, "cuda")
    options = {}
    if case == "sum":
        options["reduction"] = "sum"
    if "tokens" in case:
        options["token_weight"] = torch.rand(target.shape, device="cuda")
    if "classes" in case:
        options["ce_weight"] = torch.rand(len(weight), device="cuda")
    if "z-loss" in case:
        options["lse_square_scale"] = 1e-3
    if case == "scale":
        options["logits_scale"] = 0.3
    if case == "int32":
        target = target.int()
    if case == "all ignored":
        target, options["reduction"] = torch.full_like(target, -100), "sum"
    if case == "part of wider rows":
        weight = torch.cat([weight.detach()] * 2, 1)[:, :512].requires_grad_()
    if case == "confident":
        with torch.no_grad():
            x[:2] = 40 * F.normalize(weight[target[:2].clamp(min=0)].float(), dim=-1).bfloat16()
    for chunks in (1, 3):
        check_exponentials((x, weight, target, None), chunks, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [30, 1000])
def test_exponentials_beyond_the_range_of_numbers(scale):
    """Losses of some hundred, where exp(x_j - x_y) has no number: rows of a few tiles, then all."""
    x, weight, target, _ = make(1500, 512, 49152, torch.bfloat16, "cuda", ignored=0.1)
    for rows in (slice(300, 310), slice(None)):
        with torch.no_grad():
            x[rows] *= scale
        check_exponentials((x, weight, target, None), 2)
        assert reference(x, weight, target, reduction="none")[rows].max() > 88
        with torch.no_grad():
            x[rows] /= scale


@pytest.mark.gpu
def test_exponentials_of_rows_that_have_none():
    """A row of NaN and one whose target is out of range say so; a row that is ignored stays out of its gradient."""
    x, weight, target, _ = make(1200, 512, 65536, torch.bfloat16, "cuda", ignored=0)
    target[7], target[9] = 65536, -100
    with torch.no_grad():
        x[9] = math.nan
    loss = flce(x, weight, target)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan() and not dx[9].any() and not dx[7].any() and dx[8].any() and not dx[8].isnan().any()
    with torch.no_grad():
        x[100] = math.nan
    target[7] = 0
    assert flce(x, weight, target).isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["input", "weight", "nothing"])
def test_exponentials_are_made_where_the_input_wants_a_gradient_or_nothing_does(wanted):
    x, weight, target, _ = make(2048, 512, 65536, torch.bfloat16, "cuda")
    x.requires_grad_(wanted == "input"), weight.requires_grad_(wanted == "weight")
    liger_ops.reset_launch_counts()
    loss = flce(x, weight, target)
    assert exponentials_made() == 2 * (wanted != "weight" and has_exponentials())
    if wanted != "nothing":
        whole = [t.detach().requires_grad_() for t in (x, weight)]
        expected = torch.autograd.grad(flce(*whole, target), whole)[wanted == "weight"]
        loss.backward()
        error = torch.linalg.vector_norm((weight.grad if wanted == "weight" else x.grad) - expected)
        # One of the two may have rounded logits.
        assert error <= torch.finfo(torch.bfloat16).eps * torch.linalg.vector_norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("hidden, chunks", [(512, 1), (520, 3), (2048, None)])
def test_exponentials_of_a_loss_alone(hidden, chunks, reduction):
    """In the memory of the plan, which is that of the pass over logits and a hundredth."""
    x, weight, target, _ = inputs = make(1500, hidden, 65600, torch.bfloat16, "cuda")
    x.requires_grad_(False), weight.requires_grad_(False)
    budget = budget_for(chunks, inputs, 0) if chunks else None
    _, made, workspace, _ = plan(len(x), hidden, len(weight), x.dtype, 0, budget)
    options = dict(
        reduction=reduction, logits_scale=0.7, token_weight=torch.rand(len(x), device="cuda"), lse_square_scale=1e-3
    )
    liger_ops.reset_launch_counts()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = flce(x, weight, target, memory_budget=budget, **options)
    assert exponentials_made() == 2 * made * has_exponentials()
    assert torch.cuda.max_memory_allocated() - before <= 1.05 * workspace
    expected = reference(x.double(), weight.double(), target, **options)
    bound = torch.finfo(torch.float32).eps * float((x.abs().double() @ weight.abs().double().T).max())
    assert (loss - expected).abs().max() <= bound * (len(x) if reduction == "sum" else 1)


LARGE_LOSS = """
import json, torch, liger_ops
x, weight, target = torch.load({path!r})
x.requires_grad_(), weight.requires_grad_()
loss = torch.ops.liger.fused_linear_cross_entropy(x, weight, target)
loss.backward()
launches = json.loads(torch.ops.liger._status())["kernels"]["fused_linear_cross_entropy_exp_logits"]["launches"]
torch.save([loss.detach(), x.grad, weight.grad], {path!r} + ".out")
print(sum(launches))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["switched off", "not in the pack"])
def test_without_exponentials(case, tmp_path):
    """The same loss in another way: on demand, and where the kernel is missing."""
    inputs = make(2048, 512, 49152, torch.bfloat16, "cuda")[:3]
    path = str(tmp_path / "inputs.pt")
    torch.save([t.detach() for t in inputs], path)
    env = {"LIGER_OPS_EXPONENTIALS": "0"}
    if case == "not in the pack":
        env = {"LIGER_OPS_PACK_DIR": str(tmp_path / "packs"), "LIGER_OPS_JIT": "0"}
        (tmp_path / "packs").mkdir()
        shutil.copy(Path(liger_ops.__file__).parent / "packs" / "ptx.pack", tmp_path / "packs")
    assert int(output_of(LARGE_LOSS.format(path=path), **env)) == 0
    expected = gradients(flce, inputs, [torch.ones((), device="cuda")])
    for there, here in zip(torch.load(path + ".out"), expected):
        # There logits are rounded.
        assert torch.linalg.vector_norm(there - here) <= torch.finfo(torch.bfloat16).eps * torch.linalg.vector_norm(
            here
        )


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 2])
def test_exponentials_are_deterministic_and_captured(chunks):
    inputs = make(2048, 512, 49152, torch.bfloat16, "cuda")[:3]
    call = partial(flce, memory_budget=budget_for(chunks, inputs))

    def step():
        return [t.detach() for t in gradients(call, inputs, [torch.full((), 3.0, device="cuda")])]

    expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(step(), expected))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_replays(step, expected)


# ---- Errors

X, W, Y = torch.ones(2, 3, 8), torch.ones(10, 8), torch.zeros(2, 3, dtype=torch.int64)
ERRORS = {
    "integer input": ((X.long(), W, Y), {}, "input must be float32"),
    "weight of another dtype": ((X, W.half(), Y), {}, "weight must have the dtype of input, Float"),
    "weight of another width": ((X, torch.ones(10, 7), Y), {}, r"weight must have shape \[classes, 8\]"),
    "weight of one dimension": ((X, torch.ones(8), Y), {}, r"weight must have shape \[classes, 8\]"),
    "weight elsewhere": ((X, W.to("meta"), Y), {}, "weight must be on cpu like input"),
    "float target": ((X, W, Y.float()), {}, "target must be int64 or int32 class indices"),
    "target of another shape": ((X, W, Y[:1]), {}, r"target must have shape \[2, 3\]"),
    "target out of range": ((X, W, Y + 10), {}, r"target must lie in \[0, 10\) or be ignore_index, -100"),
    "bias of another length": ((X, W, Y, torch.ones(9)), {}, r"bias must have shape \[10\]"),
    "bias of another dtype": ((X, W, Y, torch.ones(10).double()), {}, "bias must have the dtype of input, Float"),
    "class weights of another length": ((X, W, Y, None, torch.ones(9)), {}, r"ce_weight must have shape \[10\]"),
    "learned class weights": ((X, W, Y, None, torch.ones(10, requires_grad=True)), {}, "ce_weight must not require"),
    "token weights of another shape": (
        (X, W, Y),
        dict(token_weight=torch.ones(3)),
        r"token_weight must have shape \[2, 3\]",
    ),
    "integer token weights": ((X, W, Y), dict(token_weight=Y), "token_weight must be floating point"),
    "unknown reduction": ((X, W, Y), dict(reduction="avg"), "reduction must be 'mean', 'sum' or 'none'"),
    "too much smoothing": ((X, W, Y), dict(label_smoothing=1.5), "label_smoothing must be between 0 and 1"),
    "negative softcap": ((X, W, Y), dict(softcap=-1.0), "softcap must be positive and finite"),
    "infinite scale": ((X, W, Y), dict(logits_scale=math.inf), "logits_scale must be finite"),
    "no budget": ((X, W, Y), dict(memory_budget=0), "memory_budget must be a positive number of bytes"),
    "too small a budget": ((X, W, Y), dict(memory_budget=1), r"memory_budget must be at least \d+ bytes"),
}


@pytest.mark.parametrize("op", [flce, with_metrics, with_log_probs])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, op):
    arguments, options, message = ERRORS[case]
    name = op._qualified_op_name.removeprefix("liger::")
    with pytest.raises(RuntimeError, match=rf"^{name}: {message}.*\(got "):
        op(*arguments, **options)


# ---- The kernels themselves, on CPU tensors

INTERPRETED = """
import types, sys, torch, numpy
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
from liger_ops.kernels import find

def run(path, rows, n, columns, words, ignored):
    torch.manual_seed(0)
    target = torch.randint(n, (rows,)) % 5
    # 3 + 2^40 is 3 to who reads one word of two.
    target[::4], target[1], target[2], target[3] = ignored, n, -3, 3 + (1 << 40 if words == 2 else 0)
    packed = target.to(torch.int64 if words == 2 else torch.int32).view(torch.int32)
    dlogits, taken = torch.randn(rows, n + 3).half(), torch.full((rows,), float("nan"))
    x, dweight = torch.randn(rows, columns).half(), torch.randn(n, columns).half()
    before = dlogits.clone(), dweight.clone()
    classes, order = torch.full((2, rows), -7, dtype=torch.int32)

    def launch(name, choices, grid, aligned, *args):
        kernel = find("fused_linear_cross_entropy_" + name)
        variant = kernel.pick(choices, n, aligned)
        kernel.function[(grid(variant.constexprs),)](*args, **variant.constexprs)

    blocks, halves = lambda c: -(-rows // c["BLOCK"]), {"X": "fp16"}
    launch("take_targets", halves, blocks, False, dlogits, packed, taken, rows, n, n + 3, words, ignored)
    launch("order_targets", {"WORDS": words}, blocks, False, packed, classes, order, rows, n, ignored)
    launch("add_targets", halves, lambda c: rows * -(-columns // c["BLOCK_N"]), columns % 8 == 0, dweight, x, taken, classes,
           order, rows, columns, columns, 1, columns, 0.5)
    numpy.savez(path, dlogits=dlogits, taken=taken, dweight=dweight, target=target, x=x, dlogits_before=before[0],
                dweight_before=before[1], classes=classes, order=order)
"""
INTERPRETED_CASES = [
    (*sizes, words, ignored)
    for sizes in ((9, 7, 8), (70, 300, 1032), (33, 40, 300), (1100, 20, 5))
    for words in (1, 2)
    for ignored in (-100, 2)
]


@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=lambda case: "-".join(map(str, case)))
def test_targets_in_order(case, interpreted):
    _, n, _, _, ignored = case
    got = interpreted[case]
    target = got["target"]
    known = (target >= 0) & (target < n) & (target != ignored)
    classes, order = torch.where(known, target, -1).int().sort(stable=True)
    assert torch.equal(got["classes"], classes) and torch.equal(got["order"], order.int())


@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=lambda case: "-".join(map(str, case)))
def test_kernels_interpreted(case, interpreted):
    rows, n, _, _, ignored = case
    got = interpreted[case]
    target, expected = got["target"], got["dlogits_before"].clone()
    known = ((target >= 0) & (target < n) & (target != ignored)).nonzero().flatten()
    taken = torch.zeros(rows)
    taken[known] = expected[known, target[known]].float()
    expected[known, target[known]] = 0
    assert torch.equal(got["taken"], taken) and torch.equal(got["dlogits"], expected)
    weight = got["dweight_before"].double()
    weight.index_add_(0, target[known], 0.5 * taken[known, None].double() * got["x"][known].double())
    torch.testing.assert_close(got["dweight"].double(), weight, rtol=torch.finfo(torch.half).eps, atol=1e-3)


EXPONENTIALS = """
import types, sys, torch, numpy
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
from liger_ops.kernels import cross_entropy, find, fused_linear_cross_entropy as kernels
UNKNOWN, TILE = kernels.UNKNOWN.value, find("fused_linear_cross_entropy_exp_logits").configs[0].constexprs["TILE_N"]
MEAN, HAS_GRAD, HAS_WEIGHT, SAVE_Z_LOSS, ADD_Z_LOSS = (
    getattr(cross_entropy, name).value for name in ("MEAN", "HAS_GRAD", "HAS_WEIGHT", "SAVE_Z_LOSS", "ADD_Z_LOSS")
)
TAKES, WEIGHS = kernels.TAKES.value, kernels.WEIGHS.value

def in_order(numbers):
    bits = numbers.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)

def exponentials(e, sums, x, weight, base, classes, highest, raised, scale):
    # What the product in PTX does, launched twice.
    rows, n = len(x), len(weight)
    for again in (False, True):
        flagged = highest != UNKNOWN
        lowered = base.clone()
        if again:
            lowered[flagged] = in_order(highest[flagged]).view(torch.float32)
        logits = scale * (x @ weight.T)
        known = (classes >= 0).nonzero().flatten()
        logits[known, classes[known].long()] = -torch.inf
        blocks = (torch.arange(rows) // 256)
        made = (raised[1 + blocks] != 0) if again else torch.ones(rows, dtype=torch.bool)
        if again and not raised[0]:
            break
        e[made, :n] = torch.exp(logits - lowered[:, None])[made]
        for tile in range(sums.shape[1]):
            part = slice(tile * TILE, min(n, (tile + 1) * TILE))
            sums[made, tile] = e[made, part].sum(1)
            over = sums[:, tile] > 2.0**64
            top = torch.where(over, in_order(logits[:, part].amax(1)), UNKNOWN)
            highest.copy_(torch.maximum(highest, top.int()))
            raised[1 + blocks[over]] = 1
            raised[0] |= int(over.any())

def run(path, rows, n, columns, words, takes, arrives, extras, large):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, columns), torch.randn(n, columns) * columns**-0.5
    target = torch.randint(n, (rows,))
    target[::5], target[1] = -100, n + 7
    if large:
        x[rows // 2 :] *= 300
        x[rows // 2 + 1] = 300 * weight[target[rows // 2 + 1]]
    packed = target.to(torch.int64 if words == 2 else torch.int32).view(torch.int32)
    grad, totals, scale = torch.rand(rows) + 0.5, torch.tensor([7.0, 5.0]), 0.75
    class_weight, z_scale = torch.rand(n), 1e-3 * extras
    lost, z_loss, taken = torch.full((3, rows), float("nan"))
    base, factor = torch.full((2, rows), float("nan"))
    classes, highest = torch.full((2, rows), 5, dtype=torch.int32)
    raised = torch.full((1 + -(-rows // 256),), 9, dtype=torch.int32)
    e, tiles = torch.full((rows, n + 3), float("nan")), -(-n // TILE)
    weighed = torch.full((rows, columns), float("nan"))
    # Where they fit, and the row's program has read them before it writes.
    sums = weighed[:, :tiles]

    def launch(name, *args):
        variant = find("fused_linear_cross_entropy_" + name).pick({"X": "bf16"}, columns, columns % 8 == 0)
        variant.kernel.function[(rows,)](*args, **variant.constexprs)

    launch("true_logits", base, classes, highest, raised, x, weight, packed, n, columns, columns, columns, words, -100, scale)
    exponentials(e, sums, x, weight, base, classes, highest, raised, scale)
    # A loss without gradients: sums have memory of their own.
    alone, nothing = torch.full((rows,), float("nan")), torch.empty(1)
    launch("weigh", alone, nothing, factor, taken, nothing, e.clone(), x, sums.clone(), base, classes, highest,
           class_weight, grad, totals, columns, tiles, tiles, e.stride(0), columns, 1, z_scale, HAS_WEIGHT * extras | ADD_Z_LOSS)
    flags = MEAN | HAS_GRAD * arrives | TAKES * takes | WEIGHS | HAS_WEIGHT * extras | SAVE_Z_LOSS
    launch("weigh", lost, z_loss, factor, taken, weighed, e, x, sums, base, classes, highest, class_weight, grad, totals, columns,
           tiles, sums.stride(0), e.stride(0), columns, 1, z_scale, flags)
    dweight = scale * e[:, :n].T @ weighed
    dx = scale * e[:, :n] @ weight
    if takes:
        known = (classes >= 0).nonzero().flatten()
        dweight.index_add_(0, classes[known].long(), scale * taken[known, None] * x[known])
    launch("rescale", dx, factor, taken, classes, weight, columns, columns, scale, flags)
    numpy.savez(path, loss=lost, z_loss=z_loss, alone=alone, dx=dx, dweight=dweight, x=x, weight=weight, target=target, grad=grad,
                classes=classes, class_weight=class_weight, rescued=highest != UNKNOWN)
"""
EXPONENTIALS_CASES = [
    (*sizes, words, takes, arrives, extras, large)
    for sizes in ((33, 500, 24), (300, 192, 1031))
    for words, takes, arrives in ((1, False, True), (2, True, False), (2, False, False), (1, True, True))
    for extras in (False, True)
    for large in (False, True)
]


@pytest.fixture(scope="module")
def exponentials_interpreted(tmp_path_factory):
    return interpret(EXPONENTIALS, EXPONENTIALS_CASES, tmp_path_factory.mktemp("exponentials"))


@pytest.mark.parametrize("case", EXPONENTIALS_CASES, ids=lambda case: "-".join(map(str, case)))
def test_exponentials_interpreted(case, exponentials_interpreted):
    """Losses and gradients from exponentials and their sums, by the kernels around the product that makes these."""
    *_, arrives, extras, large = case
    got = exponentials_interpreted[case]
    x, weight = (got[name].double().requires_grad_() for name in ("x", "weight"))
    target, bad = got["target"].clone(), got["target"] >= len(weight)
    assert (got["classes"][bad] == -2).all() and (got["classes"][target == -100] == -1).all()
    assert got["rescued"].any() == large and not got["rescued"].all()
    target[bad] = -100
    arriving = got["grad"].double() if arrives else torch.ones(len(x), dtype=torch.float64)
    logits, of_class = 0.75 * x @ weight.T, got["class_weight"].double() if extras else None
    loss = F.cross_entropy(logits, target, of_class, reduction="none")
    z_loss = torch.where(target == -100, 0, 1e-3 * extras * logits.logsumexp(1) ** 2)
    (loss * arriving / 7 + z_loss * arriving / 5).sum().backward()
    # Losses have the absolute error of the logits, and exponentials have it relative to them. Logits are sums in fp32,
    # which round by as much as their terms are large.
    with torch.no_grad():
        allowed = torch.finfo(torch.float32).eps * float((x.abs() @ weight.abs().T).max())
        steepest = 1 + 2e-3 * float(logits.logsumexp(1).abs().max())
    for name, truth in (("loss", loss), ("z_loss", z_loss), ("alone", loss + z_loss)):
        assert got[name][bad].isnan().all()
        assert (got[name].double() - truth.detach())[~bad].abs().max() <= allowed * steepest, name
    for mine, truth in ((got["dx"], x.grad), (got["dweight"], weight.grad)):
        assert torch.linalg.vector_norm(mine.double() - truth) <= allowed * torch.linalg.vector_norm(truth)


def test_launch_counts_name_the_cpu_path():
    liger_ops.reset_launch_counts()
    flce(X, W, Y)
    assert liger_ops.launch_counts()["cpu"] == 1


def vary(draw, arguments):
    may_be_float32(draw, arguments, "ce_weight")
    may_be_float32(draw, arguments, "token_weight")
    arguments["memory_budget"] = draw(st.sampled_from([None, 12_000]))
