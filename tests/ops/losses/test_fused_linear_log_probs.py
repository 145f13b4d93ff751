"""fused_linear_log_probs against its formula in fp64, with each part of the head trained and frozen."""

import itertools
import math
import re
from functools import partial

import linear_losses
import pytest
import torch
from allocations import peak_memory
from checks import (
    CPU_DTYPES,
    assert_no_worse,
    check_deterministic,
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
from linear_losses import rms_error
from pairs import pairwise

from liger_ops import functional as F

op = torch.ops.liger.fused_linear_log_probs

OPTIONS = {
    "plain": {},
    "entropy": dict(entropy=True),
    "entropy, announced": dict(entropy=True, entropy_grad=True),
    "softcap": dict(entropy=True, softcap=3.0, logits_scale=0.7),
    "all": dict(entropy=True, entropy_grad=True, softcap=3.0, logits_scale=1.5, temperature=0.7),
}
EXTRAS = dict(mean_logits=True, log_sum_sq_probs=True, is_top1=True)
IDS = [None, 1, 5]
FROZEN = [(), ("weight", "bias"), ("input",), ("weight",), ("input", "weight")]


def make(tokens, hidden, classes, dtype, device, ids=None, bias=False, frozen=(), ignored=0.3, head=None):
    """The first two of several ids are equal; a quarter of the positions is ignored as a whole."""
    tokens = (tokens,) if isinstance(tokens, int) else tokens
    x = torch.randn(*tokens, hidden, device=device).to(dtype)
    weight = (2 * torch.randn(classes, hidden, device=device) * max(hidden, 1) ** -0.5).to(head or dtype)
    b = torch.randn(classes, device=device).to(head or dtype) if bias else None
    target = torch.randint(max(classes, 1), tokens if ids is None else (*tokens, ids), device=device)
    if ids is not None and ids > 1:
        target[..., 1] = target[..., 0]
    target[torch.rand(target.shape, device=device) < ignored] = -100
    target.view(-1, ids or 1)[::4] = -100
    for name, t in (("input", x), ("weight", weight), ("bias", b)):
        if t is not None:
            t.requires_grad_(name not in frozen)
    return x, weight, target, b


# For test_properties.py.
noise, precision = linear_losses.noise, linear_losses.precision


def vary(draw, arguments):
    """For test_properties.py: the terms of this mean may cancel."""
    arguments |= dict(mean_logits=False)


def both(found, options):
    return tuple(found)[: 1 + bool(options.get("entropy"))]


def upstream_of(results):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(r.shape, generator=g).to(r.device) for r in results]


def close_to_formula(inputs, device, upstream=None, **options):
    """upstream: which of the results get a gradient."""
    call = lambda *t: both(op(*t, **options), options)  # noqa: E731
    formula = lambda *t: both(F.fused_linear_log_probs.reference(*t, **options), options)  # noqa: E731
    with path_taken(device):
        quiet = call(*(t if t is None else t.detach() for t in inputs))
    keep = range(len(quiet)) if upstream is None else upstream
    grads = [g for i, g in enumerate(upstream_of(quiet)) if i in keep]
    chosen = lambda f: lambda *t: tuple(f(*t)[i] for i in keep)  # noqa: E731
    with path_taken(device):
        ours = gradients(chosen(call), [like(t) for t in inputs], grads)
    assert all(torch.equal(quiet[i], r.detach()) for i, r in zip(keep, ours))
    eager = gradients(chosen(formula), [like(t) for t in inputs], grads)
    oracle = gradients(chosen(formula), [like(t, torch.float64) for t in inputs], grads)
    bounds = roundings(chosen(formula), inputs, grads, oracle, precision=inputs[0].dtype)
    wanted = [n for n, t in zip(("input", "weight", "target", "bias"), inputs) if t is not None and t.requires_grad]
    names = [("log_probs", "entropy")[i] for i in keep] + wanted
    for i, (name, *results) in enumerate(zip(names, ours, eager, oracle, strict=True)):
        # The largest of many errors varies by chance. In a small result, the rounding of a logit remains.
        noise = 3 * rms_error(*(t.detach() for t in results[1:]))
        scale = 1.0 if name in ("log_probs", "entropy") else 0.0
        assert_no_worse(name, *results, scale=scale, noise=noise, bounds=(bounds, i))
    return ours


# ---- Results and gradients


@pairwise(dtype=[*CPU_DTYPES, "mixed"], frozen=FROZEN, ids=IDS, options=OPTIONS)
def test_matches_the_formula(dtype, frozen, ids, options, device):
    head = torch.bfloat16 if dtype == "mixed" else None
    inputs = make((3, 20), 32, 100, torch.float32 if head else dtype, device, ids, True, frozen, head=head)
    close_to_formula(inputs, device, **OPTIONS[options])


@pairwise(upstream=[[0], [1]], announced=[False, True], ids=[None, 3], frozen=FROZEN[:3])
def test_gradients_of_one_result_alone(upstream, announced, ids, frozen, device):
    inputs = make(40, 32, 100, torch.float32, device, ids, True, frozen)
    close_to_formula(inputs, device, upstream, entropy=True, entropy_grad=announced)


# (tokens, hidden, classes, memory budget): blocks of classes, several chunks of tokens, and few of either.
CHUNKED = [(20, 16, 300, 6000), (130, 16, 333, 40000), (9, 8, 50, 900)]


@pairwise(sizes=CHUNKED, dtype=CPU_DTYPES, bias=[False, True], ids=[None, 3], frozen=FROZEN[:3])
def test_chunks(sizes, dtype, bias, ids, frozen, device):
    """Chunks of tokens in forward, blocks of classes and chunks of tokens in backward."""
    tokens, hidden, classes, budget = sizes
    inputs = make(tokens, hidden, classes, dtype, device, ids, bias, frozen)
    close_to_formula(inputs, device, entropy=True, memory_budget=budget)


@pairwise(dtype=CPU_DTYPES, softcap=[None, 2.0], ids=IDS)
def test_facts_about_the_distribution(dtype, softcap, ids, device):
    x, weight, target, bias = make((4, 30), 16, 50, dtype, device, ids, True)
    weight.data[7] = weight.data[3]  # equal logits: the first is top
    bias.data[7] = bias.data[3]
    target[1] = 7
    options = dict(softcap=softcap, temperature=0.8, entropy=True, **EXTRAS)
    found = F.fused_linear_log_probs(x, weight, target, bias, **options)
    exact = [like(t, torch.float64) for t in (x, weight, target, bias)]
    expected = F.fused_linear_log_probs.reference(*exact, **options)
    eager = F.fused_linear_log_probs.reference(x, weight, target, bias, **options)
    for name in ("mean_logits", "log_sum_sq_probs"):
        ours, theirs, truth = (getattr(r, name).detach() for r in (found, eager, expected))
        assert not getattr(found, name).requires_grad
        assert_no_worse(name, ours, theirs, truth, scale=1.0, noise=4 * torch.finfo(dtype).eps)
    assert found.is_top1.dtype == torch.bool and found.is_top1.shape == target.shape
    # A rounded logit may tie with, or exceed, the largest.
    differing = (found.is_top1 != expected.is_top1).sum()
    assert differing <= (0 if dtype == torch.float32 else 0.03 * target.numel()), differing
    assert not found.is_top1[1].any() or dtype != torch.float32
    assert not (found.is_top1 & (target == -100)).any()


def test_unrequested_results_are_empty(device):
    x, weight, target, _ = make((3, 5), 8, 20, torch.bfloat16, device, 2)
    found = op(x, weight, target)
    assert [t.shape for t in found] == [(3, 5, 2)] + [(0,)] * 4
    assert [t.dtype for t in found] == [torch.float32] * 4 + [torch.bool]
    assert found[0].requires_grad and not any(t.requires_grad for t in found[1:])
    asked = op(x, weight, target, entropy=True, **EXTRAS)
    assert [t.shape for t in asked] == [(3, 5, 2), (3, 5), (3, 5), (3, 5), (3, 5, 2)]
    assert [t.requires_grad for t in asked] == [True, True, False, False, False]


@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("ids", [None, 3])
def test_ignored_positions_are_zero_whatever_they_hold(ids, frozen, device):
    x, weight, target, bias = make(8, 8, 20, torch.float32, device, ids, True, frozen)
    x.data[::4] = math.nan
    target[1] = 0
    found = op(x, weight, target, bias, entropy=True, **EXTRAS)
    assert not any(t[::4].any() for t in found)
    (slope,) = torch.autograd.grad(found[0].sum() + found[1].sum(), x)
    assert not slope[::4].any() and slope[1].any()


def test_another_ignore_index(device):
    x, weight, target, _ = make(12, 8, 20, torch.float32, device)
    other = target.masked_fill(target == -100, 7)
    expected = op(x, weight, target.masked_fill(target == 7, -100), ignore_index=-100)[0]
    assert torch.equal(op(x, weight, other, ignore_index=7)[0], expected)


@pytest.mark.parametrize("ids", [None, 3])
def test_int32_ids(ids, device):
    x, weight, target, _ = make(12, 8, 20, torch.float32, device, ids)
    results = [gradients(lambda x, w, y=y: op(x, w, y)[:1], [x, weight], [torch.ones(target.shape, device=device)])
               for y in (target, target.int())]  # fmt: skip
    assert equal(*results)


@pytest.mark.parametrize("ids", [None, 3])
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=str)
def test_no_tokens(frozen, ids, device):
    x, weight, target, _ = make((0, 3), 8, 20, torch.float32, device, ids, frozen=frozen)
    found = op(x, weight, target, entropy=True, **EXTRAS)
    assert [t.numel() for t in found] == [0] * 5
    for slope in torch.autograd.grad(found[0].sum(), [t for t in (x, weight) if t.requires_grad]):
        assert not slope.any()


def test_no_hidden_columns(device):
    x, weight = torch.zeros(3, 0, device=device, requires_grad=True), torch.zeros(5, 0, device=device)
    found = op(x, weight, torch.zeros(3, dtype=torch.long, device=device))[0]
    torch.testing.assert_close(found, torch.full((3,), -math.log(5.0), device=device))


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "part of wider rows": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "every other row": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=str)
def test_layouts(frozen, layout, device):
    x, weight, target, _ = make(30, 16, 40, torch.bfloat16, device, frozen=frozen)
    for i in range(2):
        inputs = [x, weight, target, None]
        inputs[i] = LAYOUTS[layout](inputs[i].detach()).requires_grad_(inputs[i].requires_grad)
        close_to_formula(inputs, device, entropy=True)


def test_confident_predictions_keep_their_digits(device):
    """d input of a frozen head is tiny where the id is nearly certain: a difference of large terms would round it."""
    x, weight, _, _ = make(16, 32, 50, torch.bfloat16, device, frozen=("weight",))
    x.data *= 8
    target = (x.detach().double() @ weight.double().t()).argmax(-1)
    for ids in (target, torch.stack([target, (target + 1) % 50], 1)):
        close_to_formula([x, weight, ids, None], device)


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


PRODUCTS = {
    "no gradient": (("input", "weight"), {}, [0], 1),
    "frozen head": (("weight",), {}, [0], 2),
    "frozen head, entropy logged": (("weight",), dict(entropy=True), [0], 2),
    "frozen head, entropy announced": (("weight",), dict(entropy=True, entropy_grad=True), [0, 1], 3),
    "frozen head, entropy not announced": (("weight",), dict(entropy=True), [0, 1], 4),
    "frozen input": (("input",), dict(entropy=True), [0, 1], 3),
    "all": ((), dict(entropy=True), [0, 1], 4),
}


@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("ids", [None, 3])
@pytest.mark.library
def test_number_of_products(ids, case):
    frozen, options, upstream, products = PRODUCTS[case]
    inputs = make(64, 16, 300, torch.float32, "cpu", ids, frozen=frozen)

    def step():
        found = both(op(*inputs, memory_budget=40000, **options), options)
        loss = sum(found[i].sum() for i in upstream)
        return loss.backward() if loss.requires_grad else loss

    assert multiplications(step) == products * 64 * 16 * 300


@pairwise(
    ids=[None, 3], dtype=[torch.float32, torch.bfloat16], frozen=[("input", "weight"), ("weight",), ("input",), ()]
)
@pytest.mark.library
def test_peak_memory_stays_below_the_budget(ids, dtype, frozen):
    """The logits would take 16 times as much."""
    tokens, hidden, classes, budget = 1024, 32, 8192, 1 << 20
    inputs = make(tokens, hidden, classes, dtype, "cpu", ids, frozen=frozen)
    kept = sum(t.nbytes for t in inputs[:2] if t.requires_grad)

    def step():
        found = op(*inputs, entropy=True, memory_budget=budget, **EXTRAS)
        if found[0].requires_grad:
            torch.autograd.grad(
                found[0].sum() + (0 if "weight" in frozen else found[1].sum()),
                [t for t in inputs[:2] if t.requires_grad],
            )

    # Beside logits: results, and fp32 copies of bf16 blocks that add to fp32 sums.
    small = tokens * (12 + 6 * (ids or 1)) * 8
    widened = classes * hidden * 4 + budget if dtype == torch.bfloat16 and not frozen else 0
    assert tokens * classes * dtype.itemsize >= 16 * budget
    assert peak_memory(step) <= kept + budget + small + widened


@pytest.mark.gpu
@pytest.mark.parametrize("tokens,hidden", [(8192, 4096), (16384, 2048)])
@pytest.mark.parametrize("frozen", [("input", "weight"), ("weight",), ("input",), ()], ids=str)
def test_peak_memory_on_a_gpu(frozen, tokens, hidden):
    """Above the inputs and gradients: 320 MiB, and 640 MiB where forward computes the gradient."""
    x, weight, target, _ = make(tokens, hidden, 151936, torch.bfloat16, "cuda", frozen=frozen)
    wanted = [t for t in (x, weight) if t.requires_grad]

    def step():
        found = op(x, weight, target, entropy=True)
        return torch.autograd.grad(found[0].sum(), wanted) if wanted else found

    step()  # allocates the workspace of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    peak = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in wanted)
    assert kept is not None and peak <= (640 if frozen == ("weight",) else 320) * 2**20 * 1.05, peak / 2**20


@pytest.mark.gpu
@pairwise(dtype=CPU_DTYPES, classes=[50257, 32000], ids=[None, 4], frozen=FROZEN[:3])
def test_large_on_a_gpu(dtype, classes, ids, frozen):
    inputs = make(2000, 512, classes, dtype, "cuda", ids, frozen=frozen)
    for options in (dict(entropy=True, **EXTRAS), dict(softcap=20.0, memory_budget=64 << 20)):
        close_to_formula(inputs, "cuda", **options)


@pytest.mark.gpu
def test_no_synchronization_and_cuda_graph_capture():
    for frozen, ids in itertools.product(FROZEN[:3], (None, 3)):
        inputs = make(64, 32, 1000, torch.bfloat16, "cuda", ids, frozen=frozen)
        wanted = [t for t in inputs[:2] if t.requires_grad]

        def step(inputs=inputs, wanted=wanted):
            return torch.autograd.grad(sum(r.sum() for r in op(*inputs, entropy=True)[:2]), wanted)

        expected = check_no_synchronization(step)
        check_replays(step, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=str)
@pytest.mark.parametrize("ids", [1, 3])
def test_an_id_out_of_range_makes_its_row_nan(ids, frozen):
    x, weight, target, _ = make(6, 16, 40, torch.float32, "cuda", ids, frozen=frozen, ignored=0.0)
    target[1, 0], target[2, 0] = 40, -1
    found = op(x, weight, target)[0]
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert found[1:3, 0].isnan().all() and slope[1:3].isnan().all()
    assert found[3].isfinite().all() and slope[3].isfinite().all()


# ---- Memory


@pytest.mark.library
def test_a_frozen_head_saves_one_product():
    x, weight, target, _ = make(20, 8, 30, torch.float32, "cpu", frozen=("weight",))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        op(x, weight, target, entropy=True, entropy_grad=True)
    assert sorted(tuple(s.shape) for s in saved if s.dim() > 1) == [(20, 8), (20, 8)]
    assert all(s.data_ptr() not in (x.data_ptr(), weight.data_ptr()) for s in saved)


@pairwise(ids=[None, 3], frozen=FROZEN[:3])
def test_second_and_double_backward(ids, frozen, device):
    x, weight, target, _ = make(20, 8, 30, torch.float32, device, ids, frozen=frozen)
    call = lambda x, w: op(x, w, target, entropy=True, entropy_grad=True)[:2]  # noqa: E731
    grads = [torch.randn(target.shape, device=device), torch.randn(20, device=device)]
    check_second_backward(call, [x, weight], grads)
    check_no_double_backward("fused_linear_log_probs", call, [x, weight], grads)


@pytest.mark.parametrize("frozen", FROZEN[:3], ids=str)
def test_runs_are_bitwise_equal(frozen, device):
    x, weight, target, _ = make(300, 32, 500, torch.bfloat16, device, 5, frozen=frozen)
    grads = [torch.randn(300, 5, device=device), torch.randn(300, device=device)]
    check_deterministic(lambda x, w: op(x, w, target, entropy=True, memory_budget=100000)[:2], [x, weight], grads)


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=str)
def test_checkpoint(frozen, device):
    x, weight, target, _ = make(20, 8, 30, torch.bfloat16, device, frozen=frozen)
    wanted = [t for t in (x, weight) if t.requires_grad]
    again = torch.utils.checkpoint.checkpoint(op, x, weight, target, use_reentrant=False)[0]
    plain = op(x, weight, target)[0]
    assert equal(*(torch.autograd.grad(r.sum(), wanted) for r in (again, plain)))


# ---- Autograd and transforms


@pairwise(ids=[None, 3], frozen=FROZEN, options=OPTIONS)
def test_gradcheck(ids, frozen, options):
    x, weight, target, bias = make((2, 4), 3, 7, torch.float64, "cpu", ids, True, frozen)
    options = OPTIONS[options] | dict(memory_budget=500)
    assert torch.autograd.gradcheck(lambda x, w, b: both(op(x, w, target, b, **options), options), (x, weight, bias))


# ---- Bad input

X, W, Y = torch.ones(2, 8), torch.ones(5, 8), torch.zeros(2, dtype=torch.long)
ERRORS = {
    "input must be float32, float16, bfloat16 or float64": lambda: op(X.long(), W, Y),
    "weight must have the dtype of input, BFloat16": lambda: op(X.bfloat16(), W, Y),
    "weight must have the dtype of input, Float, or be float16 or bfloat16": lambda: op(X, W.double(), Y),
    r"weight must have shape \[classes, 8\]": lambda: op(X, W[:, :7], Y),
    r"bias must have shape \[5\]": lambda: op(X, W, Y, torch.ones(4)),
    "target must be int64 or int32": lambda: op(X, W, Y.float()),
    r"target must have shape \[2\], or that with one dimension more": lambda: op(X, W, Y[:1]),
    "target must be on cpu like input": lambda: op(X, W, Y.to("meta")),
    r"target must lie in \[0, 5\) or be ignore_index, -100": lambda: op(X, W, Y + 5),
    "logits_scale must be finite": lambda: op(X, W, Y, logits_scale=math.inf),
    "softcap must be positive and finite": lambda: op(X, W, Y, softcap=0.0),
    "temperature must be positive and finite": lambda: op(X, W, Y, temperature=-1.0),
    "memory_budget must be a positive number of bytes": lambda: op(X, W, Y, memory_budget=0),
    "memory_budget must be at least": lambda: op(X, W, Y, memory_budget=1),
}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.library
def test_errors(message):
    with pytest.raises(RuntimeError, match=rf"^fused_linear_log_probs: {message}.*\(got "):
        ERRORS[message]()


@pytest.mark.library
def test_a_budget_too_small_for_backward_is_refused_by_forward(device):
    """The sums of tiny heads need more than their logits."""
    x, weight, target, _ = make(4, 512, 5, torch.bfloat16, device)
    with pytest.raises(
        RuntimeError, match=r"^fused_linear_log_probs: memory_budget must be at least (\d+) bytes"
    ) as error:
        op(x, weight, target, memory_budget=2000)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    op(x, weight, target, memory_budget=least)[0].sum().backward()
    op(x.detach(), weight.detach(), target, memory_budget=2000)


def test_named_results(device):
    x, weight, target, _ = make(4, 8, 20, torch.float32, device)
    found = F.fused_linear_log_probs(x, weight, target, entropy=True)
    assert torch.equal(found.log_probs, op(x, weight, target)[0]) and found.entropy.shape == (4,)
    assert partial(F.fused_linear_log_probs, x)(weight, target).is_top1.shape == (0,)
