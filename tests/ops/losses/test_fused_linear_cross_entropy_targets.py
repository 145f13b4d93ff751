"""fused_linear_cross_entropy orders tokens by target, to accumulate the gradients of each class."""

from functools import partial

import pytest
import torch
from checks import equal, gradients
from linear_losses import INPUT, WEIGHT, budget_for, check, check_replays, flce, make, plan

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


# ---- The kernels in the interpreter


INTERPRETED = """
import types, sys, torch, numpy
package = types.ModuleType("liger_ops"); package.__path__ = ["liger_ops"]; sys.modules["liger_ops"] = package
from liger_ops.kernels import find

def run(path, rows, n, columns, words, ignored):
    torch.manual_seed(0)
    target = torch.randint(n, (rows,)) % 5
    # 3 + 2^40 reads as 3 if only the low word is read.
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
    launch("take_targets", halves, blocks, False, dlogits, packed, taken, rows, n, n + 3, words, ignored, 0)
    launch("order_targets", {"WORDS": words}, blocks, False, packed, classes, order, rows, n, ignored, 0)
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
