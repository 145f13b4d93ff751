"""fused_linear_divergence against its formula in fp64."""

import itertools
import math
from functools import partial

import linear_losses
import pytest
import torch
import torch.nn.functional as nnf
from allocations import peak_memory
from checks import (
    CPU_DTYPES,
    HALF_TYPES,
    assert_no_worse,
    check_no_double_backward,
    check_no_synchronization,
    check_replays,
    check_second_backward,
    equal,
    gradients,
    like,
    path_taken,
    roundings,
)
from linear_losses import logit_error
from pairs import pairwise
from torch import Tensor

from liger_ops import functional as F

divergence = torch.ops.liger.fused_linear_divergence
reference = F.fused_linear_divergence.reference

BETAS = [0.0, 1.0, 0.3]
OPTIONS = {
    "plain": {},
    "temperature": dict(temperature=2.0),
    "scale": dict(s_logits_scale=0.7, t_logits_scale=1.5),
    "softcap": dict(s_softcap=3.0, t_softcap=5.0),
    "one softcap": dict(t_softcap=4.0),
    "all": dict(temperature=0.6, s_logits_scale=0.7, t_logits_scale=1.5, s_softcap=3.0, t_softcap=5.0),
}


def make(tokens, classes, dtype=torch.float32, device="cpu", hidden=(16, 24), bias=False, t_dtype=None):
    """(s_input, s_weight, t_input, t_weight, s_bias, t_bias)"""
    tokens = (tokens,) if isinstance(tokens, int) else tokens
    t_dtype = t_dtype or dtype

    def side(width, dtype, learned):
        x = torch.randn(*tokens, width, device=device)
        weight = torch.randn(classes, width, device=device) * (2 * max(width, 1) ** -0.5)
        b = torch.randn(classes, device=device) if bias else None
        return [t if t is None else t.to(dtype).requires_grad_(learned) for t in (x, weight, b)]

    (x, w, b), (tx, tw, tb) = side(hidden[0], dtype, True), side(hidden[1], t_dtype, False)
    return x, w, tx, tw, b, tb


def small_budget(inputs, parts=3):
    """A budget for about this many chunks."""
    tokens = inputs[0].numel() // max(inputs[0].shape[-1], 1)
    row = (len(inputs[1]) + 63) // 64 * 64
    wide = 8 if inputs[0].dtype == torch.float64 else 4
    return (2 * row * wide + row * inputs[0].element_size() + 400) * -(-tokens // parts) + 24 * tokens


def relative(error, truth):
    largest = float(truth.abs().nan_to_num().max()) if truth.numel() else 0.0
    return error / largest if largest else 0.0


def check(inputs, device, grad=None, **options):
    """Ours and the formula in the same dtypes against the formula in fp64."""
    ours_of, exact_of = (lambda *t: tuple(divergence(*t, **options))), (lambda *t: tuple(reference(*t, **options)))
    with path_taken(device):
        ours_value = ours_of(*[t if t is None else t.detach() for t in inputs])
    shape = ours_value[0].shape
    upstream = [torch.randn(shape, device=device) if grad is None else grad]
    with path_taken(device):
        ours = gradients(ours_of, [like(t) for t in inputs], upstream)
    torch.testing.assert_close(ours[:2], [*ours_value], equal_nan=True)  # chunks without gradients have other sizes
    eager = gradients(exact_of, [like(t) for t in inputs], upstream)
    doubled = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in options.items()}
    formula = lambda *t: tuple(reference(*t, **doubled))  # noqa: E731
    oracle = gradients(formula, [like(t, torch.float64) for t in inputs], upstream)
    bounds = roundings(formula, inputs, upstream, oracle)
    assert not ours[1].requires_grad
    error = logit_error(*inputs, **options)
    for i, results in enumerate(zip(ours, eager, oracle, strict=True)):
        if i < 2:
            # The mean of the positions' errors is no larger than one; their sum grows with the root of their number.
            terms = ours[1].numel() ** 0.5 if i == 0 and options.get("reduction") == "sum" else 1
            noise = relative(error * terms, results[2])
        else:
            # A gradient sums differences of two probabilities, which have the relative error of their logits.
            noise = 2 * error
            if results[0].dtype in HALF_TYPES:
                # Ours rounds the gradients of logits to the dtype; the formula's GEMMs read them in fp32. Those of many
                # classes are about 1 / classes, and may be subnormal numbers.
                of = torch.finfo(results[0].dtype)
                noise += of.eps / 2 * max(1.0, inputs[1].shape[0] * of.smallest_normal)
        assert_no_worse(f"result {i}", *results, noise=noise, bounds=(bounds, i))
    return ours


# ---- Values


# (tokens, classes): fewest, few, many of both, an odd number of classes, and more classes than one block.
SIZES = [(1, 2), (5, 40), (70, 1000), (33, 1001), (9, 5003)]


@pairwise(reduction=["mean", "none"], sizes=SIZES, beta=BETAS, dtype=CPU_DTYPES)
def test_sizes(reduction, sizes, beta, dtype, device):
    inputs = make(*sizes, dtype, device, bias=True)
    for budget in (None, small_budget(inputs)):
        check(inputs, device, beta=beta, reduction=reduction, memory_budget=budget)


@pairwise(
    beta=BETAS, reduction=["mean", "sum", "none"], weighted=["", "mask", "mask and weights"], options=OPTIONS,
    dtype=[torch.float32, torch.float16],
)  # fmt: skip
def test_options(beta, reduction, weighted, options, dtype, device):
    inputs = make((3, 20), 200, dtype, device, bias=True)
    arguments = dict(OPTIONS[options], beta=beta, reduction=reduction, memory_budget=small_budget(inputs))
    if "mask" in weighted:
        arguments["mask"] = torch.rand(3, 20, device=device) < 0.6
    if "weights" in weighted:
        arguments["token_weight"] = torch.rand(3, 20, device=device)
    check(inputs, device, **arguments)


# ---- A teacher of other classes


def with_map(inputs, classes, dtype=torch.int64):
    """The inputs with a teacher of `classes` classes, and the student's classes among them: in any order, some twice."""
    x, w, tx, tw, b, tb = inputs
    tw = torch.randn(classes, tw.shape[1], device=tw.device).to(tw.dtype) * (2 * tw.shape[1] ** -0.5)
    tb = tb if tb is None else torch.randn(classes, device=tw.device).to(tw.dtype)
    return (x, w, tx, tw, b, tb), torch.randint(classes, w.shape[:1], device=w.device, dtype=dtype)


@pairwise(
    reduction=["mean", "sum", "none"], wanted=["x", "w b", "x w b"], options=OPTIONS, chunks=[1, 3, 12],
    weighted=["", "mask and weights"], classes=[40, 300], dtype=[torch.float32, torch.bfloat16, torch.float16],
)  # fmt: skip
def test_vocab_map(reduction, wanted, options, chunks, weighted, classes, dtype, device):
    inputs, index = with_map(make((3, 20), 50, dtype, device, bias=True), classes)
    for name, t in zip("xw  b", inputs):
        if t.requires_grad:
            t.requires_grad_(name in wanted.split())
    arguments = dict(OPTIONS[options], reduction=reduction, vocab_map=index)
    if weighted:
        arguments |= dict(mask=torch.rand(3, 20, device=device) < 0.6, token_weight=torch.rand(3, 20, device=device))
    if chunks > 1:
        arguments["memory_budget"] = small_budget(inputs, chunks) + 60 // chunks * 8 * (64 + classes)
    check(inputs, device, **arguments)


def test_vocab_map_of_all_classes_changes_nothing(device):
    x, w, tx, tw, b, tb = make((3, 20), 50, torch.float32, device, bias=True)
    order = torch.randperm(50, device=device)
    expected = divergence(x, w, tx, tw, b, tb)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(50, device=device)).int()
    found = divergence(x, w, tx, tw[order], b, tb[order], vocab_map=back)
    for ours, theirs in zip(found, expected):
        # Of both results, and of the two sums of exponentials whose ratio is the share of the classes.
        assert (ours - theirs).abs().max() <= 4 * logit_error(x, w, tx, tw, b, tb)


def test_masked_positions_are_not_read_with_a_vocab_map(device):
    for reduction in ("mean", "none"):
        (x, w, tx, tw, b, tb), index = with_map(make(6, 300, device=device, bias=True), 700)
        mask = torch.tensor([1, 1, 0, 1, 0, 1], device=device).bool()
        tx[2], tx[4] = math.nan, math.inf
        found, _ = divergence(x, w, tx, tw, b, tb, mask=mask, vocab_map=index, reduction=reduction)
        slopes = torch.autograd.grad(found.sum(), (x, w, b))
        assert found.isfinite().all() and all(s.isfinite().all() for s in slopes)


@pytest.mark.parametrize("beta", BETAS)
def test_pytorchs_own_functions(beta, device):
    x, w, tx, tw, b, tb = make(12, 50, torch.float64, "cpu", bias=True)
    found, entropy = divergence(x, w, tx, tw, b, tb, beta=beta, temperature=2.0)
    s, t = (nnf.linear(*i).div(2).log_softmax(-1) for i in ((x, w, b), (tx, tw, tb)))
    kl = lambda p, q: nnf.kl_div(q, p, log_target=True, reduction="none").sum(-1)  # noqa: E731
    m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta)) if 0 < beta < 1 else None
    expected = kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, m) + (1 - beta) * kl(s, m)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=s.detach()).entropy())


@pairwise(
    reduction=["mean", "none"], wanted=["x", "w", "b", "x w", "x b", "w b", "x w b", ""], beta=BETAS,
    dtype=[torch.float32, torch.bfloat16],
)  # fmt: skip
def test_only_required_gradients(reduction, wanted, beta, dtype, device):
    x, w, _, _, b, _ = inputs = make(20, 100, dtype, device, bias=True)
    for name, t in (("x", x), ("w", w), ("b", b)):
        t.requires_grad_(name in wanted.split())
    ours = check(inputs, device, beta=beta, reduction=reduction, memory_budget=small_budget(inputs))
    assert ours[0].requires_grad == bool(wanted)


@pytest.mark.parametrize("s_dtype, t_dtype", [*itertools.permutations(CPU_DTYPES, 2)])
def test_models_of_different_dtypes(s_dtype, t_dtype, device):
    for reduction in ("mean", "none"):
        check(make(20, 100, s_dtype, device, bias=True, t_dtype=t_dtype), device, beta=0.5, reduction=reduction)


@pairwise(dtype=[torch.float32, torch.bfloat16], distance=[1e-1, 1e-2, 1e-3], beta=BETAS)
def test_close_models(dtype, distance, beta, device):
    """Rounding must not hide a small divergence. The error is compared with that of log_softmax and kl_div on logits
    that were computed in fp32."""
    x, w, _, _, _, _ = make(64, 2000, dtype, device, hidden=(32, 32))
    tx = (x.detach().float() * (1 + distance * torch.randn(64, 32, device=device))).to(dtype)
    tw = w.detach().clone()
    found = divergence(x, w, tx, tw, beta=beta)[0]
    exact = reference(*(t.double() for t in (x, w, tx, tw)), beta=beta)[0]
    plain = reference(*(t.float() for t in (x, w, tx, tw)), beta=beta)[0]
    error, allowed = ((t.double() - exact).abs().max() for t in (found, plain))
    assert error <= allowed
    slopes = [
        torch.autograd.grad(f(*i, beta=beta)[0].sum(), i[0])[0].double()
        for f, i in ((divergence, (x, w, tx, tw)), (reference, [like(t, torch.float64) for t in (x, w, tx, tw)]))
    ]
    error = (slopes[0] - slopes[1]).norm() / slopes[1].norm()
    assert error < (2 * torch.finfo(dtype).eps if dtype in HALF_TYPES else 1e-6 / distance)


def test_equal_models_have_no_divergence(device):
    x, w = make(10, 300, device=device)[:2]
    for beta in BETAS:
        found = divergence(x, w, x.detach(), w.detach(), beta=beta)[0]
        assert not found.any() and torch.autograd.grad(found.sum(), x)[0].abs().max() < 1e-6


def test_impossible_classes(device):
    """A bias of -inf removes a class, from both models or from one."""
    inf = math.inf
    for beta in BETAS:
        x, w, tx, tw, b, tb = make(4, 30, device=device, bias=True)
        b, tb = b.detach().clone(), tb.clone()
        b[3], tb[3] = -inf, -inf
        if beta != 1:
            tb[7] = -inf
        if beta != 0:
            b[8] = -inf
        found = divergence(x, w, tx, tw, b, tb, beta=beta)
        torch.testing.assert_close([*found], [*reference(x, w, tx, tw, b, tb, beta=beta)])
        assert found[0].isfinite().all() and torch.autograd.grad(found[0].sum(), x)[0].isfinite().all()
    tb[9] = -inf
    assert (divergence(x, w, tx, tw, b, tb, beta=1.0)[0] == inf).all()


@pairwise(dtype=CPU_DTYPES, reduction=["mean", "sum", "none"])
def test_everything_masked(dtype, reduction, device):
    x, w, tx, tw, b, tb = make(6, 40, dtype, device, bias=True)
    mask = torch.zeros(6, dtype=torch.bool, device=device)
    found, entropy = divergence(x, w, tx, tw, b, tb, mask=mask, reduction=reduction)
    assert found.isnan() if reduction == "mean" else not found.any()
    assert not entropy.any()
    for gradient in torch.autograd.grad(found.sum(), (x, w, b)):
        assert not gradient.any()


def test_masked_positions_are_not_read(device):
    for beta, reduction in itertools.product(BETAS, ["mean", "none"]):
        x, w, tx, tw, _, _ = make(6, 300, device=device)
        mask = torch.tensor([1, 1, 0, 1, 0, 1], device=device).bool()
        tx[2], tx[4] = math.nan, math.inf
        found, entropy = divergence(x, w, tx, tw, mask=mask, beta=beta, reduction=reduction)
        slopes = torch.autograd.grad(found.sum(), (x, w))
        assert found.isfinite().all() and all(s.isfinite().all() for s in slopes)
        assert not slopes[0][~mask].any() and not entropy[~mask].any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_no_tokens(shape, reduction, device):
    x, w, tx, tw, b, tb = make(shape, 40, torch.bfloat16, device, bias=True)
    found, entropy = divergence(x, w, tx, tw, b, tb, reduction=reduction)
    assert entropy.shape == shape and found.shape == (shape if reduction == "none" else ())
    assert found.isnan() if reduction == "mean" else not found.any()
    slopes = torch.autograd.grad(found.sum(), (x, w, b))
    assert slopes[0].shape == x.shape and not slopes[1].any() and not slopes[2].any()


def test_one_token_without_leading_dimension(device):
    check(make((), 40, torch.float32, device), device)


def test_no_hidden_columns_and_no_classes(device):
    x, w, tx, tw, _, _ = make(5, 7, device=device, hidden=(0, 4))
    found = divergence(x, w, tx, tw)[0]
    assert found.isfinite().all()
    assert [g.shape for g in torch.autograd.grad(found.sum(), (x, w))] == [x.shape, w.shape]
    x, w, tx, tw, _, _ = make(5, 0, device=device)
    found, entropy = divergence(x, w, tx, tw)
    assert not found.any() and not entropy.any() and not torch.autograd.grad(found.sum(), x)[0].any()


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "part of wider rows": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every other column": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "misaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("argument", range(6))
def test_layouts(argument, layout, device):
    inputs = [t.detach() for t in make((4, 9), 100, torch.bfloat16, device, bias=True)]
    if inputs[argument].dim() > 1 or layout not in ("transposed",):
        inputs[argument] = LAYOUTS[layout](inputs[argument])
    for i in (0, 1, 4):
        inputs[i].requires_grad_()
    ours = check(inputs, device, memory_budget=small_budget(inputs))
    assert ours[3].stride() == torch.empty_like(inputs[1]).stride()


def test_small_gradients_survive_fp16(device):
    """A small probability divided by the number of tokens underflows in fp16."""
    inputs = make(1024, 4000, torch.float16, device)
    grad = [torch.tensor(1024.0, device=device)]
    call = lambda f: lambda *t: f(*t, reduction="mean")[0]  # noqa: E731
    ours = gradients(call(divergence), inputs, grad)
    oracle = gradients(call(reference), [like(t, torch.float64) for t in inputs], grad)
    for mine, truth in zip(ours[1:], oracle[1:]):
        assert torch.linalg.vector_norm(mine.double() - truth) / truth.norm() < torch.finfo(torch.float16).eps


@pairwise(spread=[0.1, 2.0], reduction=["mean", "none"], parts=[1, 5, 60], dtype=HALF_TYPES)
def test_chunked_gradients_are_as_accurate_as_eager(spread, reduction, parts, dtype, device):
    """Eager code with logits in the dtype of the inputs. The smaller the spread of the logits, the smaller is the error of
    their rounding, beside that of d weight in each chunk."""
    inputs = make(1024, 4000, dtype, device)
    for i in (1, 3):
        inputs = [*inputs[:i], (inputs[i].detach() * (spread / 2)).requires_grad_(i == 1), *inputs[i + 1 :]]

    def eager(x, w, tx, tw, b=None, tb=None):
        s, t = (nnf.linear(*i).float().log_softmax(-1) for i in ((x, w), (tx, tw)))
        losses = nnf.kl_div(s, t, log_target=True, reduction="none").sum(-1)
        return losses.mean() if reduction == "mean" else losses

    call = lambda *t: divergence(*t, reduction=reduction, memory_budget=small_budget(inputs, parts))[0]  # noqa: E731
    # Scaled, so that results are normal numbers of fp16.
    grad = [torch.tensor(1024.0, device=device) if reduction == "mean" else torch.randn(1024, device=device)]
    ours, theirs = gradients(call, inputs, grad), gradients(eager, [like(t) for t in inputs], grad)
    oracle = gradients(lambda *t: reference(*t, reduction=reduction)[0], [like(t, torch.float64) for t in inputs], grad)
    for i, (mine, other, truth) in enumerate(zip(ours[1:], theirs[1:], oracle[1:], strict=True)):
        assert_no_worse(f"gradient {i}", mine, other, truth)
        error, allowed = (torch.linalg.vector_norm(t.double() - truth) for t in (mine, other))
        # cuBLAS rounds the product of a small GEMM before it adds to it: with the gradients of logits and five sums, that
        # is 1.58 times the error of eager code's two roundings.
        assert error <= (1.5 if device == "cpu" else 1.7) * allowed


# ---- Memory


@pytest.mark.library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs, reduction", [("x w", "mean"), ("x w", "none"), ("x", "none"), ("", "none")])
@pytest.mark.parametrize("maps", [False, True])
def test_peak_memory_on_cpu(maps, needs, reduction, dtype):
    """All logits of one model would take 16 times the budget, or 8 times in bf16."""
    tokens, classes, hidden, budget = 2048, 8192, 16, 4 << 20
    x, w, tx, tw, _, _ = make(tokens, classes, dtype, hidden=(hidden, hidden))
    wanted = [t.requires_grad_(name in needs.split()) for name, t in (("x", x), ("w", w))]
    wanted = [t for t in wanted if t.requires_grad]
    options = dict(vocab_map=torch.arange(classes)) if maps else dict(beta=0.5)

    def step():
        found = divergence(x, w, tx, tw, **options, reduction=reduction, memory_budget=budget)[0]
        return torch.autograd.grad(found.sum(), wanted) if wanted else found

    # Beside logits and gradients: results per token, and on CPU fp32 copies of bf16 rows and heads.
    widened = (tokens + classes) * hidden * 4 if dtype == torch.bfloat16 else 0
    assert peak_memory(step) <= sum(t.nbytes for t in wanted) + budget + widened + 64 * tokens


@pytest.mark.gpu
@pairwise(needs=["both", "input", "nothing"], reduction=["mean", "none"], mib=[None, 320, 64])
def test_peak_memory(needs, reduction, mib):
    x, w, tx, tw, _, _ = make(4096, 128256, torch.bfloat16, "cuda", hidden=(1024, 512))
    x.requires_grad_(needs != "nothing")
    w.requires_grad_(needs == "both")
    wanted = [t for t in (x, w) if t.requires_grad]

    def step():
        budget = None if mib is None else mib << 20
        found = divergence(x, w, tx, tw, beta=0.5, reduction=reduction, memory_budget=budget)[0]
        return torch.autograd.grad(found.sum(), wanted) if wanted else found

    step()  # allocates the workspace of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    peak = torch.cuda.max_memory_allocated() - before
    usual = 1280 if reduction == "mean" else 640 if needs == "input" else 320
    allowed = (mib or usual) << 20
    assert kept is not None and peak <= sum(t.nbytes for t in wanted) + 1.05 * allowed


def test_the_upstream_gradient_scales_the_gradients(device):
    for dtype in CPU_DTYPES:
        x, w, tx, tw, _, _ = make(50, 40, dtype, device)
        found = [divergence(x, w, tx, tw, reduction="mean")[0] for _ in range(2)]
        ones = torch.autograd.grad(found[0], (x, w))
        halves = torch.autograd.grad(found[1], (x, w), torch.tensor(-0.5, device=device))
        for half, one in zip(halves, ones):
            # A power of two rounds nothing but subnormal numbers.
            spacing = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
            torch.testing.assert_close(half, one * -0.5, rtol=0, atol=spacing)


CALLS = {
    "reduced": lambda *t: divergence(*t, beta=0.5, reduction="mean")[0],
    "trained head": lambda *t: divergence(*t, beta=0.5)[0],
    "frozen head": lambda x, w, *t: divergence(x, w.detach(), *t, beta=0.5)[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_second_backward_of_a_frozen_head(dtype, device):
    """Forward computes the gradient, which backward scales."""
    x, *others = make(50, 40, dtype, device)
    inputs = [x, *(t if t is None else t.detach() for t in others)]
    grad = torch.randn(50, device=device)
    check_second_backward(CALLS["frozen head"], inputs, [grad])
    check_no_double_backward("fused_linear_divergence", CALLS["frozen head"], inputs, [grad])


@pytest.mark.parametrize("name", ["t_input", "t_weight", "t_bias", "token_weight"])
def test_forward_mode_of_what_is_not_learned_is_refused(name):
    names = ("s_input", "s_weight", "t_input", "t_weight", "s_bias", "t_bias")
    arguments = dict(zip(names, (t.detach() for t in make(5, 10, bias=True))), token_weight=torch.ones(5))
    with torch.autograd.forward_ad.dual_level():
        arguments[name] = torch.autograd.forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(RuntimeError, match="forward-mode automatic differentiation is not supported"):
            divergence(**arguments)


def test_checkpoint(device):
    x, w, tx, tw, _, _ = make(50, 40, torch.bfloat16, device)
    found = torch.utils.checkpoint.checkpoint(CALLS["reduced"], x, w, tx, tw, use_reentrant=False)
    assert equal(torch.autograd.grad(found, (x, w)), torch.autograd.grad(CALLS["reduced"](x, w, tx, tw), (x, w)))


# ---- Transforms


@pairwise(reduction=["mean", "sum", "none"], beta=BETAS, options=["plain", "all"])
def test_gradcheck(reduction, beta, options):
    x, w, tx, tw, b, tb = make((2, 4), 7, torch.float64, hidden=(3, 4), bias=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]]).bool()
    call = partial(
        divergence, beta=beta, reduction=reduction, mask=mask, token_weight=torch.rand(2, 4), **OPTIONS[options],
        memory_budget=10_000,
    )  # fmt: skip
    torch.autograd.gradcheck(lambda x, w, b: call(x, w, tx, tw, b, tb)[0], (x, w, b))
    torch.autograd.gradcheck(lambda x: call(x, w.detach(), tx, tw, b.detach(), tb)[0], (x,))


# ---- Bad input

X, W = torch.ones(2, 3, 8), torch.ones(10, 8)
ERRORS = {
    "integer input": (dict(s_input=X.long()), "s_input must be float32"),
    "scalar input": (dict(s_input=torch.tensor(1.0)), "s_input must have at least one dimension"),
    "sparse weight": (dict(s_weight=W.to_sparse()), "s_weight must be a dense, unquantized tensor"),
    "weight of another dtype": (dict(s_weight=W.half()), "s_weight must have the dtype of s_input, Float"),
    "teacher weight of another dtype": (dict(t_weight=W.half()), "t_weight must have the dtype of t_input, Float"),
    "weight of another width": (dict(s_weight=W[:, :7]), r"s_weight must have shape \[classes, 8\]"),
    "teacher elsewhere": (dict(t_input=X.to("meta")), "t_input must be on cpu like s_input"),
    "teacher positions": (dict(t_input=X[:1]), r"t_input must have shape \[2, 3\] and one dimension more"),
    "teacher classes": (dict(t_weight=W[:9]), "t_weight must have 10 classes like s_weight"),
    "bias": (dict(s_bias=torch.ones(9)), r"s_bias must have shape \[10\]"),
    "teacher bias": (dict(t_bias=torch.ones(10).half()), "t_bias must have the dtype of t_input, Float"),
    "map": (dict(vocab_map=torch.zeros(9).long()), r"vocab_map must have shape \[10\]"),
    "map of floats": (dict(vocab_map=torch.zeros(10)), "vocab_map must be int64 or int32"),
    "map of a mixture": (dict(vocab_map=torch.zeros(10).long(), beta=0.5), "vocab_map must be None unless beta is 0"),
    "map and group": (
        dict(vocab_map=torch.zeros(10).long(), group="0", classes=10),
        "vocab_map must be None with a group",
    ),
    "mask": (dict(mask=torch.ones(2, 3)), "mask must be bool"),
    "mask shape": (dict(mask=torch.ones(2).bool()), r"mask must have shape \[2, 3\]"),
    "token weights": (dict(token_weight=torch.ones(2, 3).long()), "token_weight must be floating point"),
    "token weights shape": (dict(token_weight=torch.ones(3)), r"token_weight must have shape \[2, 3\]"),
    "learned teacher": (dict(t_input=X.clone().requires_grad_()), "t_input must not require a gradient"),
    "learned teacher head": (dict(t_weight=W.clone().requires_grad_()), "t_weight must not require a gradient"),
    "beta": (dict(beta=1.5), "beta must be between 0 and 1"),
    "temperature": (dict(temperature=0.0), "temperature must be positive and finite"),
    "scale": (dict(t_logits_scale=math.inf), "t_logits_scale must be finite"),
    "softcap": (dict(s_softcap=-1.0), "s_softcap must be positive and finite"),
    "reduction": (dict(reduction="batchmean"), "reduction must be 'mean', 'sum' or 'none'"),
    "no budget": (dict(memory_budget=0), "memory_budget must be a positive number of bytes"),
    "too small a budget": (dict(memory_budget=1), r"memory_budget must be at least \d+ bytes"),
}


@pytest.mark.library
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=rf"^fused_linear_divergence: {message}.*\(got "):
        divergence(**dict(s_input=X, s_weight=W, t_input=X, t_weight=W) | arguments)


@pytest.mark.library
def test_a_map_out_of_range():
    for wrong in (-1, 10, 2**62):
        with pytest.raises(
            IndexError, match=rf"^fused_linear_divergence: vocab_map must lie in \[0, 10\) \(got {wrong}\)"
        ):
            divergence(X, W, X, W, vocab_map=torch.full((10,), wrong))


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


# ---- GPU only


@pytest.mark.gpu
@pairwise(dtype=CPU_DTYPES, beta=BETAS, classes=[32000, 50257, 128256, 151936, 600_001])
def test_vocabularies(dtype, beta, classes):
    inputs = make(300, classes, dtype, "cuda", hidden=(64, 128))
    for reduction in ("mean", "none"):
        for budget in (None, small_budget(inputs, 4)):
            check(inputs, "cuda", beta=beta, reduction=reduction, memory_budget=budget)


@pytest.mark.gpu
@pytest.mark.parametrize("call", CALLS)
def test_no_synchronization_and_cuda_graph_capture(call):
    x, w, tx, tw, _, _ = make(64, 9000, torch.bfloat16, "cuda")
    w = w.detach() if "frozen" in call else w
    wanted = [t for t in (x, w) if t.requires_grad]
    step = lambda: torch.autograd.grad(CALLS[call](x, w, tx, tw).sum(), wanted)  # noqa: E731
    expected = check_no_synchronization(step)
    check_replays(step, expected)


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits():
    inputs = make(16400, 131200, torch.bfloat16, "cuda", hidden=(64, 64))
    call = lambda budget: lambda *t: divergence(*t, reduction="mean", memory_budget=budget)[0]  # noqa: E731
    grad = [torch.ones((), device="cuda")]
    large, small = (gradients(call(budget), inputs, grad) for budget in (24 << 30, 1 << 30))
    for a, b in zip(large, small):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-2 * float(b.detach().abs().max()))
