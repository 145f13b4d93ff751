"""fused_linear_cross_entropy and its variants with metrics and log-probabilities against fp64."""

import math
from functools import partial

import linear_losses
import pytest
import torch
import torch.nn.functional as F
from checks import CPU_DTYPES, HALF_TYPES, assert_no_worse, gradients, like, path_taken, roundings
from linear_losses import (
    BIAS,
    INPUT,
    WEIGHT,
    budget_for,
    check,
    flce,
    logits_of,
    make,
    plan,
    reference,
    with_log_probs,
    with_metrics,
)
from pairs import pairwise

import liger_ops

# ---- Values


# (tokens, hidden, classes): fewest, few, many, an odd number of classes, and nothing aligned.
SIZES = [(1, 8, 2), (5, 16, 40), (70, 64, 1000), (130, 24, 1001), (33, 7, 61)]


@pairwise(chunks=[1, 3], sizes=SIZES, dtype=CPU_DTYPES)
def test_sizes(chunks, sizes, dtype, device):
    tokens, hidden, classes = sizes
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


@pairwise(
    dtype=CPU_DTYPES, reduction=["mean", "sum", "none"], weighted=["", "classes", "tokens", "classes and tokens"],
    options=OPTIONS,
)  # fmt: skip
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


@pairwise(reduction=["mean", "sum", "none"], dtype=CPU_DTYPES)
def test_all_targets_ignored(reduction, dtype, device):
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


@pairwise(bias=[False, True], confident=[False, True], chunks=[2, 4, 16], dtype=HALF_TYPES)
def test_chunked_gradients_are_as_accurate_as_one_gemm(bias, confident, chunks, dtype, device):
    """Accuracy does not depend on the number of chunks. Confident predictions leave small gradients, which would show
    logits that were rounded before the bias was added."""
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
    """A small probability divided by the number of tokens underflows in fp16."""
    x, weight, target, _ = inputs = make(4096, 16, 4000, torch.float16, device, ignored=0.0)
    ours = gradients(flce, inputs, [torch.tensor(4096.0, device=device)])
    oracle = gradients(reference, [like(t, torch.float64) for t in inputs], [torch.tensor(4096.0, device=device)])
    for mine, truth in zip(ours[1:], oracle[1:]):
        error = torch.linalg.vector_norm(mine.double() - truth) / torch.linalg.vector_norm(truth)
        assert error < torch.finfo(torch.float16).eps


@pairwise(
    wanted=["x", "weight", "bias", "x weight", "x bias", "weight bias", ""], dtype=[torch.float32, torch.bfloat16],
    reduction=["mean", "sum", "none"],
)  # fmt: skip
def test_only_required_gradients(wanted, dtype, reduction, device):
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


cross_entropy_with_metrics = torch.ops.liger.cross_entropy_with_metrics


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_metrics_equal_those_of_cross_entropy(reduction, options, device):
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


@pairwise(classes=[2560, 5003, 9001, 20000, 70001], reduction=["none", "mean"], dtype=[torch.float32, torch.bfloat16])
def test_predictions_over_many_classes(classes, reduction, dtype, device):
    """The largest logit occurs twice, at varying positions; the first occurrence is predicted."""
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
    formula = partial(torch.nn.functional.cross_entropy, target=target, reduction=reduction)
    logits = logits_of(x, weight, None, 1.0).detach().float()
    bounds = roundings(formula, [logits], [], [formula(logits.double())])
    assert_no_worse("loss", loss, formula(logits), formula(logits.double()), bounds=(bounds, 0))


@pairwise(reduction=["mean", "none"], classes=[40, 1001, 9000], softcap=[None, 5.0])
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


# ---- CUDA only


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits():
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


# ---- Errors


X, W, Y = torch.ones(2, 3, 8), torch.ones(10, 8), torch.zeros(2, 3, dtype=torch.int64)


ERRORS = {
    "integer input": ((X.long(), W, Y), {}, "input must be float32"),
    "weight of another dtype": ((X, W.half(), Y), {}, "weight must have the dtype of input, Float"),
    "weight of another width": ((X, torch.ones(10, 7), Y), {}, r"weight must have shape \[classes, 8\]"),
    "weight of one dimension": ((X, torch.ones(8), Y), {}, r"weight must have shape \[classes, 8\]"),
    "weight elsewhere": ((X, W.to("meta"), Y), {}, "weight must be on cpu like input"),
    "float target": ((X, W, Y.float()), {}, "target must be int64 or int32"),
    "target of another shape": ((X, W, Y[:1]), {}, r"target must have shape \[2, 3\]"),
    "parts of classes alone": ((X, W, Y), dict(class_sizes=[10]), "class_sizes must be None without a group"),
    "a part of a sequence alone": ((X, W, Y), dict(sequence_dim=0), "sequence_dim must be None without a group"),
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


def test_launch_counts_name_the_cpu_path():
    liger_ops.reset_launch_counts()
    flce(X, W, Y)
    assert liger_ops.launch_counts()["cpu"] == 1


# For test_properties.py.
noise, precision = linear_losses.noise, linear_losses.precision
