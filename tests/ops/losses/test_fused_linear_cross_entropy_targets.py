"""fused_linear_cross_entropy orders tokens by target, to accumulate the gradients of each class."""

from functools import partial

import pytest
import torch
from checks import check_no_synchronization, check_replays, equal, gradients
from linear_losses import INPUT, WEIGHT, budget_for, check, flce, make, plan

# ---- CUDA only


# Up to 16384 tokens, all pairs of targets are compared; more are sorted.
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


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", TOKENS_TO_ORDER)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_synchronization_and_cuda_graph_capture(dtype, reduction, tokens):
    inputs = make(tokens, 64, 1000, dtype, "cuda")[:3]
    call = partial(flce, reduction=reduction, memory_budget=budget_for(6, inputs))
    grad = torch.ones((tokens,) if reduction == "none" else (), device="cuda") * 3

    def step():
        # Detach: a live autograd graph would tie the next step to this step's stream.
        return [t.detach() for t in gradients(call, inputs, [grad])]

    expected = check_no_synchronization(step)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert equal(step(), expected)
    torch.cuda.synchronize()
    check_replays(step, expected)
