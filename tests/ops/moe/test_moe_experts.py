"""moe_experts and moe_experts_sorted against their formulas in fp64."""

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.reference.moe_experts import moe_experts as declared
from liger_ops.reference.moe_experts import moe_experts_sorted as declared_sorted
from tests.support.calls import GPT_OSS
from tests.support.checks import (
    CPU_DTYPES,
    check_no_synchronization,
    check_op,
    check_results,
    equal,
    gradients,
    has_hopper_kernels,
)
from tests.support.families.experts import EVERY_OPTION, MANY_ROWS, inputs_of, sorted_inputs, with_options
from tests.support.pairs import pairwise

moe_experts, moe_experts_sorted = torch.ops.liger.moe_experts, torch.ops.liger.moe_experts_sorted


def check(inputs, grads, device, op=moe_experts, formula=declared, **options):
    # A product sums over a row of x, of gate_up or of down, or over the rows of an expert.
    check_op(with_options(op, **options), with_options(formula.reference, **options), inputs, grads, device)


SIZES = [
    (1, 8, 8, 4, 1),
    (1, 5, 3, 2, 8),
    (7, 9, 11, 5, 3),
    (33, 40, 24, 8, 4),
    (150, 64, 40, 3, 2),
    (150, 16, 24, 17, 8),
]


@pairwise(size=SIZES, dtype=CPU_DTYPES)
def test_sizes(size, dtype, device):
    check(*inputs_of(*size, dtype, device), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(1000, 512, 384, 16, 4), (777, 264, 136, 64, 8), (4096, 1024, 256, 128, 8)])
def test_large_sizes_on_cuda(size, transposed, dtype):
    check(*inputs_of(*size, dtype, "cuda", transposed), "cuda", transposed=transposed)


@pairwise(options=EVERY_OPTION, size=[(23, 24, 16, 5, 3), (9, 7, 5, 3, 2)], bias=[False, True])
def test_options(size, options, bias, device):
    if options.get("weight_before"):
        bias = False
    inputs, grads = inputs_of(*size, device=device, transposed=options.get("transposed", False), bias=bias)
    check(inputs, grads, device, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", EVERY_OPTION)
@pytest.mark.parametrize("size", MANY_ROWS)
def test_options_with_many_rows(size, options, bias):
    if options.get("weight_before"):
        bias = False
    transposed = options.get("transposed", False)
    inputs, grads = inputs_of(*size, torch.bfloat16, "cuda", transposed, bias)
    check(inputs, grads, "cuda", **options)
    op = with_options(moe_experts, **options)
    every = dict(zip([i for i, t in enumerate(inputs) if t.requires_grad], gradients(op, inputs, grads)[1:]))
    for wanted in ([0], [1], [2], [4], [0, 4]):  # the others are frozen
        some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
        assert equal(gradients(op, some, grads)[1:], [every[i] for i in wanted])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size, dtype, products",
    [
        (MANY_ROWS[0], torch.bfloat16, 6),
        (MANY_ROWS[0], torch.float16, 0),
        ((2100, 264, 1016, 4, 2), torch.bfloat16, 5),  # narrow experts: the first product is ours
        ((2000, 264, 1032, 4, 2), torch.bfloat16, 2),  # few rows: gradients of weights only
        ((2100, 264, 1030, 4, 2), torch.bfloat16, 0),  # unaligned
    ],
)
def test_products_that_are_pytorchs_grouped_gemm(size, dtype, products):
    inputs, grads = inputs_of(*size, dtype, "cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(moe_experts, inputs, grads)
    found = sum(event.name == "aten::_grouped_mm" for event in profile.events())
    assert found == products * has_hopper_kernels()


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(1500, 0, 2000, 700), (0, 0, 0, 0), (4200, 0, 0, 0), (0, 0, 0, 9999), (1, 0, 7, 2)])
@pytest.mark.parametrize("options", [dict(), GPT_OSS])
def test_many_sorted_rows(counts, options):
    inputs, grads = sorted_inputs(4200, 264, 1032, counts, torch.bfloat16, "cuda", options.get("transposed", False))
    check(inputs, grads, "cuda", moe_experts_sorted, declared_sorted, **options)
    out = moe_experts_sorted(*inputs, **options)
    assert not out[sum(counts) :].any()


@pairwise(
    counts=[(3, 0, 4, 1), (0, 0, 0, 0), (8, 0, 0, 0), (0, 0, 0, 8), (130, 7, 0, 200), (2, 2, 2, 2)],
    options=[dict(), GPT_OSS],
)
def test_sorted_rows(counts, options, device):
    rows = max(8, sum(counts))
    inputs, grads = sorted_inputs(rows, 24, 16, counts, device=device, transposed=options.get("transposed", False))
    check(inputs, grads, device, moe_experts_sorted, declared_sorted, **options)
    out = moe_experts_sorted(*inputs, **options)
    assert not out[sum(counts) :].any()


def test_sorted_rows_have_biases(device):
    inputs, grads = sorted_inputs(12, 24, 16, (3, 0, 7), device=device, bias=True)
    check(inputs, grads, device, moe_experts_sorted, declared_sorted)


ROUTES = {
    "one expert": lambda t, k: torch.zeros(t, k),
    "the last expert": lambda t, k: torch.full((t, k), 3),
    "all dropped": lambda t, k: torch.full((t, k), 4),
    "negative": lambda t, k: torch.full((t, k), -1),
    "duplicates": lambda t, k: torch.arange(t)[:, None].expand(t, k) % 4,
    "half dropped": lambda t, k: torch.arange(t * k).view(t, k) % 8,
    "far outside": lambda t, k: torch.arange(t * k).view(t, k) % 5 * 2**31,
}


@pairwise(route=ROUTES, index_dtype=[torch.int64, torch.int32])
def test_routes(route, index_dtype, device):
    index = ROUTES[route](150, 2).long()
    if index_dtype == torch.int32:
        index = index.clamp(-5, 100).int()
    check(*inputs_of(150, 16, 8, 4, 2, device=device, index=index), device)


@pytest.mark.parametrize("size", [(0, 8, 8, 4, 2), (3, 8, 8, 4, 0), (3, 0, 8, 4, 2), (3, 8, 0, 4, 2)])
def test_empty(size, device):
    inputs, grads = inputs_of(*size, device=device, bias=True)
    for ours, theirs in zip(gradients(moe_experts, inputs, grads), gradients(declared.reference, inputs, grads)):
        torch.testing.assert_close(ours, theirs)


def test_no_experts(device):
    """As on a device whose experts are all elsewhere. The formula has no gradients then."""
    inputs, grads = inputs_of(3, 8, 8, 0, 2, device=device, bias=True)
    out, *found = gradients(moe_experts, inputs, grads)
    assert out.shape == (3, 8) and not any(t.any() for t in (out, *found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_may_be_float32(dtype, device):
    (x, gate_up, down, index, weight), grads = inputs_of(23, 24, 16, 5, 3, dtype, device)
    weight = weight.detach().float().requires_grad_()
    check([x, gate_up, down, index, weight], grads, device)


def test_a_part_of_wider_experts(device):
    """Other layouts are in test_every_operator.py."""
    inputs, _ = inputs_of(23, 24, 16, 5, 3, device=device)
    x, gate_up, *others = inputs
    part = torch.cat([gate_up, gate_up], 1).detach()[:, : gate_up.shape[1]]
    assert torch.equal(moe_experts(x, part, *others), moe_experts(*inputs))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(gate_up=torch.ones(5, 32, 9)), r"gate_up must have shape \[experts, 2 inner, hidden\], \[5, 32, 8\]"),
        (dict(transposed=True), r"gate_up must have shape \[experts, hidden, 2 inner\]"),
        (dict(activation="relu"), r"activation must be 'silu', 'gelu' or 'gelu_tanh' \(got 'relu'\)"),
        (dict(limit=0.0), r"limit must be positive \(got 0\)"),
        (dict(activation="gelu", alpha=1.5), r"alpha must be 1 with gelu \(got 1.5\)"),
        (
            dict(gate_up_bias=torch.ones(5, 32), weight_before=True),
            r"gate_up_bias must be absent with weight_before \(got a tensor\)",
        ),
    ],
)
def test_bad_arguments(changes, message):
    """Others, and counts of rows, are in test_wrong_calls.py."""
    inputs, _ = inputs_of(7, 8, 16, 5, 3)
    given = dict(zip(("x", "gate_up", "down", "index", "weight"), inputs)) | changes
    with pytest.raises(RuntimeError, match="moe_experts: " + message):
        moe_experts(**given)


# ---- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("counts", [(3, -1, 2), (3, 4, 600), (2**31 - 1, 2**31 - 1, 5), (2**62, -(2**63), 2**62)])
def test_wrong_counts_stay_within_the_rows(counts, dtype):
    """As if they were between 0 and the rows that are left."""
    (x, gate_up, down, _), _ = sorted_inputs(12, 24, 16, (3, 0, 7), device="cuda")
    given = torch.tensor(counts).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
    ends = torch.tensor(counts).clamp(0, 12).cumsum(0).clamp(max=12)
    mended = ends.diff(prepend=ends.new_zeros(1))
    found, expected = (moe_experts_sorted(x, gate_up, down, c.cuda()) for c in (given, mended))
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1000, 512, 384, 16, 4), *MANY_ROWS])
def test_a_cuda_graph_captures_it_without_synchronization(size, dtype):
    inputs, grads = inputs_of(*size, dtype, "cuda")

    def step(index):
        # A live graph of another stream would break the capture.
        return [t.detach() for t in gradients(moe_experts, [*inputs[:3], index, inputs[4]], grads)]

    other = (inputs[3] + 3) % size[3]
    expected, expected_other = check_no_synchronization(lambda: step(inputs[3])), step(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inputs[3])
    graph.replay()
    assert equal(found, expected)
    # Routing is data: the same graph serves another.
    inputs[3].copy_(other)
    graph.replay()
    assert equal(found, expected_other)


@pytest.mark.gpu
def test_peak_memory():
    """Backward writes over the first product and over the gradient of the activation, and frees rows early."""
    tokens, hidden, inner, experts, choices = 4096, 1024, 512, 32, 8
    inputs, grads = inputs_of(tokens, hidden, inner, experts, choices, torch.bfloat16, "cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = moe_experts(*inputs)
        torch.autograd.grad(out, [t for t in inputs if t.requires_grad], grads)
        peak = torch.cuda.max_memory_allocated() - before
        del out
    pairs, rows = tokens * choices, 2 * tokens * hidden
    of_weights = 2 * 3 * experts * hidden * inner
    pre, wide = 2 * 2 * pairs * inner, 2 * pairs * hidden
    assert peak <= pre + wide + max(of_weights // 3 + pre // 2, of_weights) + 3 * rows + (16 << 20)


@pytest.mark.gpu
def test_many_pairs_and_experts():
    torch.manual_seed(0)
    tokens, experts, choices = 1 << 17, 512, 8
    index = torch.randint(experts + 9, (tokens, choices), device="cuda")
    inputs, _ = inputs_of(tokens, 64, 32, experts, choices, torch.bfloat16, "cuda", index=index)
    out = moe_experts(*inputs)
    rows = torch.randint(tokens, (50,), device="cuda")
    x, gate_up, down, _, weight = (t.detach() for t in inputs)
    check_results([out[rows]], declared.reference, [x[rows], gate_up, down, index[rows], weight[rows]], [])


# ---- For test_properties.py


def precision(x, **_):
    """Both round the products in between to the dtype, each in its own order."""
    return x.dtype


def vary(draw, arguments):
    x, gate_up = arguments["x"], arguments["gate_up"]
    experts = gate_up.shape[0]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    if experts == 0:  # the formula has no gradients
        for t in (t for t in arguments.values() if isinstance(t, Tensor)):
            t.requires_grad_(False)
    if "index" in arguments:
        shape, kind = arguments["index"].shape, arguments["index"].dtype
        arguments["index"] = torch.randint(-1, experts + 1, shape, generator=generator).to(kind)
        if arguments["weight_before"]:
            arguments["gate_up_bias"] = None
    else:
        counts = torch.randint(0, 1 + len(x) // max(experts, 1), (experts,), generator=generator)
        arguments["tokens_per_expert"] = counts.to(arguments["tokens_per_expert"].dtype)
    if arguments["activation"] != "silu":
        arguments["alpha"] = 1.0
