"""fused_linear_cross_entropy: memory use, upstream gradients, and gradcheck."""

import math
from functools import partial

import pytest
import torch
from allocations import peak_memory
from checks import (
    check_deterministic,
    equal,
)
from linear_losses import INPUT, WEIGHT, budget_for, flce, make, plan
from solo_group import solo_group

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
    # This shape needs one chunk by default.
    assert plan(4096, 4096, 128256, torch.bfloat16, INPUT | WEIGHT, None)[:2] == (4096, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [None, 256, 64])
@pytest.mark.parametrize("needs", ["both", "input", "nothing"])
def test_peak_memory_matches_the_plan(needs, mib):
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

    step()  # allocates the workspace of cuBLAS
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = step()
    peak = torch.cuda.max_memory_allocated() - before
    assert kept is not None and peak == pytest.approx(workspace + grads, rel=0.05)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.library
def test_peak_memory_stays_below_the_budget(is_split):
    """With split classes, two buffers of logits would take twice as much."""
    tokens, hidden, classes, budget = 1024, 32, 8192, 1 << 20
    x, weight, target, _ = make(tokens, hidden, classes, torch.float32, "cpu")
    split = dict(group=solo_group(), classes=classes) if is_split else {}
    kept = x.nbytes + weight.nbytes

    def step():
        return torch.autograd.grad(flce(x, weight, target, memory_budget=budget, **split), (x, weight))

    assert tokens * classes * 4 >= 16 * budget
    assert peak_memory(step) <= kept + budget


def test_the_upstream_gradient_scales_the_gradients(device):
    x, weight, target, _ = make(50, 16, 40, torch.float32, device)
    ones = torch.autograd.grad(flce(x, weight, target), (x, weight))
    halves = torch.autograd.grad(flce(x, weight, target), (x, weight), torch.tensor(-0.5, device=device))
    assert all(torch.equal(half, one * -0.5) for half, one in zip(halves, ones))


@pytest.mark.parametrize("name", ["ce_weight", "token_weight"])
def test_forward_mode_of_what_is_not_learned_is_refused(name):
    x, weight, target, bias = (t if t is None else t.detach() for t in make(5, 8, 10, torch.float32, "cpu", bias=True))
    arguments = dict(input=x, weight=weight, bias=bias, ce_weight=torch.ones(10), token_weight=torch.ones(5))
    with torch.autograd.forward_ad.dual_level():
        arguments[name] = torch.autograd.forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(RuntimeError, match="forward-mode automatic differentiation is not supported"):
            flce(target=target, **arguments)


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
def test_no_hidden_columns(shape, device):
    """Without hidden columns, all logits are zero."""
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
