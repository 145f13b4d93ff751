"""moe_router against its formula in fp64, and the routers of transformers."""

import math

import pytest
import torch

from liger_ops import functional as F
from tests.support.checks import (
    CPU_DTYPES,
    assert_no_worse,
    gradients,
    like,
    path_taken,
    roundings,
)
from tests.support.pairs import pairwise, sizes_by_device

moe_router = torch.ops.liger.moe_router
reference = F.moe_router.reference

# Experts and choices of Mixtral, gpt-oss, OLMoE, Qwen3-MoE, DeepSeek-V3 and others, and sizes that nothing divides.
SIZES = [
    (1, 1),
    (2, 1),
    (8, 2),
    (31, 5),
    (32, 4),
    (60, 4),
    (64, 8),
    (128, 8),
    (160, 6),
    (256, 8),
    (384, 32),
    (1024, 10),
]
OPTIONS = {
    "softmax": {},
    "unnormalized": dict(normalize=False, scale=2.5),
    "sigmoid": dict(score="sigmoid"),
    "groups": dict(score="sigmoid", groups=4, top_groups=2, scale=2.5),
    "groups of a softmax": dict(groups=8, top_groups=3, normalize=False),
    "root": dict(score="sqrtsoftplus", scale=1.5),
    "groups of roots": dict(score="sqrtsoftplus", groups=4, top_groups=2, normalize=False),
}


def vary(draw, arguments):
    from hypothesis import strategies as st

    n = arguments["logits"].shape[-1]
    if (experts := arguments["experts"]) is not None and 0 < experts.shape[-1] <= min(n, 32):
        arguments |= dict(groups=1, top_groups=1, top_k=experts.shape[-1], bias=None, experts=experts % n)
        return
    # Scores that are rounded to half precision may choose other experts than exact ones.
    if arguments["score"] == "sqrtsoftplus" and arguments["logits"].dtype.itemsize == 2:
        arguments["score"] = "sigmoid"
    groups = draw(st.sampled_from([g for g in range(1, n + 1) if n % g == 0]))
    top_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, min(n // groups * top_groups, 32)))
    arguments |= dict(groups=groups, top_groups=top_groups, top_k=top_k, experts=None)


def make(shape, dtype=torch.float32, device="cpu", bias=False, token_weight=False):
    logits = (3 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    of_experts = torch.randn(shape[-1], device=device) if bias else None
    of_tokens = (torch.rand(shape[:-1], device=device) < 0.7) * 1.5 if token_weight else None
    return logits, of_experts, of_tokens


def check(logits, top_k, bias, token_weight, device, **options):
    arguments = (top_k, bias, token_weight)
    wanted = 5 if options.get("statistics") else 2
    call = lambda x: tuple(moe_router(x, *arguments, **options))[:wanted]  # noqa: E731
    formula = lambda x: tuple(reference(x, *arguments, **options))[:wanted]  # noqa: E731
    outs = call(logits.detach())
    grads = [torch.randn(o.shape, device=device) for o in outs]
    with path_taken(device):
        ours = gradients(call, [like(logits)], grads)
    eager = gradients(formula, [like(logits)], grads)
    oracle = gradients(formula, [like(logits, torch.float64)], grads)
    assert torch.equal(ours[1], oracle[1]), "index"
    scale = max(float(g.abs().max()) for g in grads)
    bounds = roundings(formula, [logits], grads, oracle)
    for i, results in enumerate(zip(ours, eager, oracle)):
        if i != 1:
            assert_no_worse(f"result {i}", *results, scale=scale if i == len(ours) - 1 else 0.0, bounds=(bounds, i))


# n: experts and choices.
@sizes_by_device(cpu=[(1, 1), (31, 5), (64, 8), (384, 32)], cuda=SIZES, dtype=CPU_DTYPES)
def test_sizes(n, dtype, device):
    check(make((3, 35, n[0]), dtype, device)[0], n[1], None, None, device, statistics=True)


@pairwise(options=OPTIONS, bias=[False, True], token_weight=[False, True])
def test_options(options, bias, token_weight, device):
    for statistics in (False, True):
        logits, *others = make((70, 64), torch.float32, device, bias, token_weight)
        check(logits, 6, *others, device, statistics=statistics, **OPTIONS[options])


def rounded_roots(x):
    """sqrt(softplus(x)) with two roundings to the dtype of x, from fp64."""
    first = torch.nn.functional.softplus(x.double()).to(x.dtype)
    return first.double().sqrt().to(x.dtype)


def without_close_calls(x):
    """1 in place of numbers whose rounded roots differ if softplus is computed a little less accurately."""
    exact = torch.nn.functional.softplus(x.double())
    low, high = ((exact * (1 + sign * 2**-20)).to(x.dtype) for sign in (-1, 1))
    roots = [(t.double().sqrt() * (1 + sign * 2**-20)).to(x.dtype) for t in (low, high) for sign in (-1, 1)]
    same = torch.stack([t == roots[0] for t in roots]).all(0) & (low == high)
    assert same.double().mean() > 0.9
    return torch.where(same, x, 1.0).to(x.dtype)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_roots_decide(dtype, with_bias, device):
    """Many scores are equal after rounding; of these the first is chosen."""
    torch.manual_seed(0)
    logits = without_close_calls((4 + torch.randn(60, 64)).to(dtype))
    bias = torch.randn(64).round() / 8 if with_bias else None
    scores = rounded_roots(logits).float()
    by = scores if bias is None else scores + bias
    assert (by.sort(-1).values.diff() == 0).any()
    expected = by.sort(dim=-1, descending=True, stable=True).indices[:, :6]
    chosen = scores.gather(1, expected)
    on_device = (t if t is None else t.to(device) for t in (logits, bias))
    x, bias = on_device
    with path_taken(device):
        found = moe_router(x, 6, bias, score="sqrtsoftplus", scale=1.5)
    for routing in (found, reference(x, 6, bias, score="sqrtsoftplus", scale=1.5)):
        assert torch.equal(routing[1].cpu(), expected)
        torch.testing.assert_close(routing[0].cpu(), 1.5 * chosen / chosen.sum(-1, keepdim=True))


@pairwise(score=["softmax", "sigmoid", "sqrtsoftplus"], normalize=[False, True], statistics=[False, True])
def test_experts_that_are_given(score, normalize, statistics, device):
    logits, *_ = make((40, 16), device=device)
    # The first rows name an expert twice.
    experts = torch.randint(0, 16, (40, 4), device=device)
    experts[:5, 1:] = experts[:5, :1]
    for given in (experts, experts.int()):
        options = dict(score=score, normalize=normalize, scale=1.5, experts=given)
        check(logits, 4, None, None, device, statistics=statistics, **options)
        routing = moe_router(logits, 4, **options)
        assert torch.equal(routing[1], experts) and routing[1].data_ptr() != given.data_ptr()


def test_chosen_experts_given_again(device):
    logits, *_ = make((40, 16), device=device)
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        first = moe_router(logits, 4, score=score, statistics=True)
        again = moe_router(logits, 4, score=score, statistics=True, experts=first[1])
        assert all(map(torch.equal, first, again))


def test_roots_far_below_zero(device):
    logits = torch.tensor([[-30.0, -60.0, -80.0, 30.0, math.inf, -math.inf]], device=device, requires_grad=True)
    weights, *_ = moe_router(logits, 6, score="sqrtsoftplus", normalize=False)
    order = [4, 3, 0, 1, 2, 5]
    exact = torch.nn.functional.softplus(logits.detach().double()).sqrt()[0, order]
    torch.testing.assert_close(weights[0].double(), exact, rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(weights[0, 1:].sum(), logits)
    x = logits.detach().double()[0, order][1:5]
    torch.testing.assert_close(slope[0, order][1:5].double(), x.sigmoid() / (2 * exact[1:5]), rtol=1e-5, atol=0)
    assert slope.isfinite().all()


def test_upstream_gradients(device):
    """Only one of the results."""
    logits, _, token_weight = make((40, 16), device=device, token_weight=True)
    for wanted in (0, 3, 4):
        found = []
        for function in (moe_router, reference):
            out = function(logits, 3, None, token_weight, "sigmoid", statistics=True)[wanted]
            upstream = torch.arange(1.0, 1 + out.numel(), device=device).view(out.shape)
            found.append(torch.autograd.grad(out, logits, upstream)[0])
        torch.testing.assert_close(*found)


def test_ties_go_to_the_first(device):
    logits = torch.tensor([[1.0, 2, 2, 0, 2], [0, 0, 0, 0, 0]], device=device)
    assert moe_router(logits, 3)[1].tolist() == [[1, 2, 4], [0, 1, 2]]
    saturated = torch.tensor([[90.0, 200.0, 100.0]], device=device)
    assert moe_router(saturated, 3, score="sigmoid")[1].tolist() == [[1, 2, 0]]


def test_special_values(device):
    logits = torch.randn(5, 8, device=device)
    logits[0, 3], logits[1, 2], logits[2, 1:] = math.nan, math.inf, -math.inf
    logits[3] = -200.0
    weights, index, *_ = moe_router(logits, 2)
    assert weights[0].isnan().any() and index[0, 0] == 3 and index[1, 0] == 2 and index[2, 0] == 0
    assert (index >= 0).all() and (index < 8).all()
    assert moe_router(logits[3:4], 2, score="sigmoid")[0].isfinite().all()


def test_rows_that_do_not_count_are_left_out(device):
    logits, *_ = make((6, 8), device=device)
    with torch.no_grad():
        logits[:3] = math.nan
    weight = torch.tensor([0.0, 0, 0, 1, 1, 2], device=device)
    found = moe_router(logits, 2, None, weight, statistics=True)
    expected = moe_router(torch.cat([logits[3:], logits[5:]]), 2, statistics=True)
    for a, b in zip(found[2:], expected[2:]):
        torch.testing.assert_close(a, b)
    (slope,) = torch.autograd.grad(found[3].square().sum() + found[4], logits)
    assert not slope[:3].any() and slope.isfinite().all()


def test_losses(device):
    """As the docstring computes them, against Switch Transformers' formula."""
    logits = torch.randn(50, 8, device=device)
    found = F.moe_router(logits, 2, statistics=True)
    balance = 8 * (found.tokens / 50 * found.scores / 50).sum()
    shares = torch.nn.functional.one_hot(logits.topk(2).indices, 8).float().sum(1).mean(0)
    torch.testing.assert_close(balance, 8 * (shares * logits.softmax(-1).mean(0)).sum())
    torch.testing.assert_close(found.z / 50, logits.logsumexp(-1).square().mean())


def routers():
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

    sizes = dict(hidden_size=32, num_experts_per_tok=3)
    yield qwen3.Qwen3MoeTopKRouter(qwen3.Qwen3MoeConfig(num_experts=16, norm_topk_prob=True, **sizes)), {}
    yield (
        qwen3.Qwen3MoeTopKRouter(qwen3.Qwen3MoeConfig(num_experts=16, norm_topk_prob=False, **sizes)),
        dict(normalize=False),
    )
    yield mixtral.MixtralTopKRouter(mixtral.MixtralConfig(num_local_experts=16, **sizes)), {}
    yield gpt_oss.GptOssTopKRouter(gpt_oss.GptOssConfig(num_local_experts=16, **sizes)), {}
    config = deepseek.DeepseekV3Config(
        n_routed_experts=16, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, **sizes
    )
    yield (
        deepseek.DeepseekV3TopkRouter(config),
        dict(score="sigmoid", groups=4, top_groups=2, scale=2.5),
    )


@pytest.mark.parametrize("i", range(5))
def test_agrees_with_transformers(i, device):
    torch.manual_seed(1)
    router, options = list(routers())[i]
    router.to(device)
    for p in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(40, 32, device=device)
    logits, weights, index = router(x)
    bias = getattr(router, "e_score_correction_bias", None)
    found = moe_router(logits, 3, bias, **options)
    order, own = index.argsort(-1), found[1].argsort(-1)
    assert torch.equal(index.gather(-1, order), found[1].gather(-1, own))
    torch.testing.assert_close(found[0].gather(-1, own), weights.gather(-1, order))
    slopes = [torch.autograd.grad(w.square().sum(), router.weight, retain_graph=True)[0] for w in (found[0], weights)]
    torch.testing.assert_close(*slopes)


ERRORS = {
    "experts": (lambda x: moe_router(x.new_zeros(2, 1025), 2), r"logits must have at most 1024 experts \(got 1025\)"),
    "score": (
        lambda x: moe_router(x, 2, score="relu"),
        "score must be 'softmax', 'sigmoid' or 'sqrtsoftplus' .got 'relu'",
    ),
    "shape of experts": (
        lambda x: moe_router(x, 2, experts=x[:, :3].long()),
        r"experts must have shape \[4, 2\] \(got \[4, 3\]\)",
    ),
    "experts and a bias": (
        lambda x: moe_router(x, 2, x[0], experts=x[:, :2].long()),
        r"bias must be None, because experts are given \(got a tensor\)",
    ),
    "experts and groups": (
        lambda x: moe_router(x, 2, groups=2, experts=x[:, :2].long()),
        r"groups must be 1, because experts are given \(got 2\)",
    ),
    "groups": (lambda x: moe_router(x, 2, groups=5), r"groups must divide the 16 experts \(got 5\)"),
    "top_groups": (lambda x: moe_router(x, 2, groups=4, top_groups=5), r"top_groups must lie in \[1, 4\] \(got 5\)"),
    "top_k": (lambda x: moe_router(x, 17), r"top_k must lie in \[1, 16\] \(got 17\)"),
    "top_k of groups": (lambda x: moe_router(x, 5, groups=4), r"top_k must lie in \[1, 4\] \(got 5\)"),
    "many choices": (lambda x: moe_router(x.new_zeros(2, 64), 33), r"top_k must lie in \[1, 32\] \(got 33\)"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.library
def test_errors(error, device):
    call, message = ERRORS[error]
    with pytest.raises(RuntimeError, match=f"moe_router: {message}"):
        call(torch.randn(4, 16, device=device))


@pytest.mark.library
def test_experts_out_of_range():
    """On CPU. On CUDA, such an expert has the weight 0."""
    for wrong in (-1, 16):
        with pytest.raises(IndexError, match=rf"moe_router: experts must lie in \[0, 16\) \(got {wrong}\)"):
            moe_router(torch.randn(4, 16), 2, experts=torch.full((4, 2), wrong))


@pytest.mark.gpu
def test_experts_out_of_range_on_a_gpu():
    logits, wrong = torch.randn(4, 16, device="cuda"), torch.tensor([-1, 16, 2**32 + 1, -(2**63)], device="cuda")
    given = torch.stack([wrong, torch.arange(4, device="cuda")], 1)
    weights, index, *_ = moe_router(logits, 2, experts=given, normalize=False)
    assert index[:, 0].tolist() == [-1] * 4 and not weights[:, 0].any()
    scores = logits.softmax(-1).gather(1, given[:, 1:])
    assert torch.allclose(weights[:, 1:], scores, rtol=1e-5)
