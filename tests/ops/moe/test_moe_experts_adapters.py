"""moe_experts and moe_experts_sorted with low-rank adapters of each expert, against their formulas in fp64."""

import pytest
import torch

from liger_ops.reference.moe_experts import moe_experts as declared
from liger_ops.reference.moe_experts import moe_experts_sorted as declared_sorted
from tests.support.calls import GPT_OSS
from tests.support.checks import CPU_DTYPES, check_no_synchronization, check_op, check_replays, equal, gradients
from tests.support.families.experts import EVERY_OPTION, MANY_ROWS, inputs_of, sorted_inputs
from tests.support.host.allocations import largest_allocation
from tests.support.pairs import pairwise

ADAPTERS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
SCALES = dict(gate_up_scale=0.5, down_scale=2.0)


def parameters_of(experts, hidden, inner, ranks, dtype, device="cpu"):
    """A and B of both weights as peft stores them: (r E, in) and (out, r E), with the expert running fastest in B."""
    generator = torch.Generator().manual_seed(1)

    def make(rows, columns, depth):
        return (torch.randn(rows, columns, generator=generator) * depth**-0.5).to(device, dtype).requires_grad_()

    (first, second), inner = ranks, max(inner, 1)
    return [
        make(first * experts, hidden, hidden), make(2 * inner, first * experts, first),
        make(second * experts, inner, inner), make(hidden, second * experts, second),
    ]  # fmt: skip


def views_of(parameters, experts):
    a, b = ([p.view(experts, -1, p.shape[1]) for p in parameters[::2]], parameters[1::2])
    b = [p.view(p.shape[0], -1, experts).permute(2, 0, 1) for p in b]
    return dict(zip(ADAPTERS, (a[0], b[0], a[1], b[1])))


def adapted(function, experts, **options):
    """A function of the other tensors and of the parameters."""

    def call(*tensors):
        return function(*tensors[:-4], **views_of(tensors[-4:], experts), **SCALES, **options)

    return call


def adapted_inputs(*size, ranks=(3, 8), dtype=torch.float32, device="cpu", of_adapters=None, frozen=False, **more):
    inputs, grads = inputs_of(*size, dtype, device, **more)
    _, hidden, inner, experts, _ = size
    inputs = [t.detach().requires_grad_(t.requires_grad and not (frozen and t.dim() == 3)) for t in inputs]
    return [*inputs, *parameters_of(experts, hidden, inner, ranks, of_adapters or dtype, device)], grads


def op_of(experts, **options):
    return adapted(torch.ops.liger.moe_experts, experts, **options)


def check(inputs, grads, experts, device, op=torch.ops.liger.moe_experts, formula=declared, **options):
    calls = (adapted(function, experts, **options) for function in (op, formula.reference))
    check_op(*calls, inputs, grads, device)


@pairwise(
    size=[(1, 8, 8, 4, 1), (7, 9, 11, 5, 3), (150, 64, 40, 3, 2), (150, 16, 24, 17, 8)],
    ranks=[(1, 1), (4, 3), (16, 8), (8, 40)],
    dtype=CPU_DTYPES,
)
def test_sizes(size, ranks, dtype, device):
    inputs, grads = adapted_inputs(*size, ranks=ranks, dtype=dtype, device=device)
    check(inputs, grads, size[3], device)


@pairwise(options=EVERY_OPTION, size=[(23, 24, 16, 5, 3), (9, 7, 5, 3, 2)], bias=[False, True], frozen=[False, True])
def test_options(size, options, bias, frozen, device):
    bias &= not options.get("weight_before", False)
    transposed = options.get("transposed", False)
    inputs, grads = adapted_inputs(*size, device=device, bias=bias, frozen=frozen, transposed=transposed)
    check(inputs, grads, size[3], device, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [dict(), GPT_OSS], ids=["halves", "gpt-oss"])
def test_float32_beside_half_precision(options, dtype, device):
    size, transposed = (150, 64, 40, 3, 2), options.get("transposed", False)
    inputs, grads = adapted_inputs(
        *size, dtype=dtype, device=device, of_adapters=torch.float32, frozen=True, transposed=transposed
    )
    check(inputs, grads, size[3], device, **options)


@pytest.mark.parametrize("counts", [(3, 0, 4, 1), (0, 0, 0, 0), (130, 7, 0, 200), (0, 0, 0, 8)], ids=str)
@pytest.mark.parametrize("options", [dict(), GPT_OSS], ids=["halves", "gpt-oss"])
def test_sorted_rows(counts, options, device):
    rows = max(9, sum(counts) + 1)
    inputs, grads = sorted_inputs(rows, 24, 16, counts, device=device, transposed=options.get("transposed", False))
    inputs += parameters_of(4, 24, 16, (3, 8), torch.float32, device)
    op = torch.ops.liger.moe_experts_sorted
    check(inputs, grads, 4, device, op, declared_sorted, **options)
    out = adapted(op, 4, **options)(*inputs)
    assert not out[sum(counts) :].any()


@pytest.mark.parametrize("of", ["gate_up", "down"])
def test_adapters_of_one_weight(of, device):
    inputs, grads = adapted_inputs(23, 24, 16, 5, 3, device=device)
    kept = 0 if of == "gate_up" else 2
    inputs = [*inputs[:5], *inputs[5 + kept : 7 + kept]]

    def call(function):
        def run(*tensors):
            a, b = tensors[5:]
            a, b = a.view(5, -1, a.shape[1]), b.view(b.shape[0], -1, 5).permute(2, 0, 1)
            return function(*tensors[:5], **{f"{of}_a": a, f"{of}_b": b, f"{of}_scale": 0.5})

        return run

    check_op(call(torch.ops.liger.moe_experts), call(declared.reference), inputs, grads, device)


def test_gradients_lie_as_the_parameters(device):
    """So that no copy is needed where the adapters are views of them."""
    inputs, grads = adapted_inputs(23, 24, 16, 5, 3, device=device)
    views = {name: t.detach().requires_grad_() for name, t in views_of(inputs[-4:], 5).items()}
    out = torch.ops.liger.moe_experts(*inputs[:5], **views)
    found = torch.autograd.grad(out, [*views.values()], grads)
    assert [g.stride() for g in found] == [t.stride() for t in views.values()]


def test_adapters_of_rank_zero_add_nothing(device):
    inputs, grads = inputs_of(23, 24, 16, 5, 3, device=device)
    shapes = [(5, 0, 24), (5, 32, 0), (5, 0, 16), (5, 24, 0)]
    empty = [torch.ones(shape, device=device).requires_grad_() for shape in shapes]
    found = gradients(
        lambda *t: torch.ops.liger.moe_experts(*t[:5], **dict(zip(ADAPTERS, t[5:]))), inputs + empty, grads
    )
    assert equal(found[:5], gradients(torch.ops.liger.moe_experts, inputs, grads))
    assert [g.shape for g in found[5:]] == [*map(torch.Size, shapes)]


def test_frozen_arguments(device):
    """All but one, or one alone. The gradients of the others are the same bits."""
    inputs, grads = adapted_inputs(23, 24, 16, 5, 3, device=device, bias=True)
    places = [i for i, t in enumerate(inputs) if t.is_floating_point()]
    every = dict(zip(places, gradients(op_of(5), inputs, grads)[1:]))
    for wanted in (*([place] for place in places), *([i for i in places if i != place] for place in places)):
        some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(inputs)]
        assert equal(gradients(op_of(5), some, grads)[1:], [every[i] for i in wanted])


def test_no_weight_is_merged():
    """Nothing as large as a weight is allocated, in forward or backward."""
    inputs, grads = adapted_inputs(8, 64, 48, 64, 2, ranks=(2, 2), frozen=True)

    def step():
        gradients(op_of(64), inputs, grads)

    assert largest_allocation(step) < 4 * 64 * 64 * 48


def bad(**changes):
    inputs, _ = adapted_inputs(7, 8, 16, 5, 3)
    x, gate_up, down, index, weight = (t.detach() for t in inputs[:5])
    views = {name: t.detach() for name, t in views_of(inputs[-4:], 5).items()}
    return dict(x=x, gate_up=gate_up, down=down, index=index, weight=weight, **views) | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(gate_up_a=None), r"gate_up_a must accompany gate_up_b \(got None\)"),
        (dict(down_b=None), r"down_b must accompany down_a \(got None\)"),
        (dict(down_b=torch.ones(5, 9, 8)), r"down_b must have shape \[experts, hidden, rank\], \[5, 8, 8\]"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(RuntimeError, match="moe_experts: " + message):
        torch.ops.liger.moe_experts(**bad(**changes))


def test_adapters_of_one_weight_share_a_dtype():
    given = {name: t if name == "down_b" else t.bfloat16() if t.is_floating_point() else t for name, t in bad().items()}
    with pytest.raises(RuntimeError, match=r"down_b must have the dtype of down_a, BFloat16 \(got Float\)"):
        torch.ops.liger.moe_experts(**given)


# ---- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("of_adapters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [dict(), GPT_OSS, dict(transposed=True)], ids=["halves", "gpt-oss", "transposed"])
@pytest.mark.parametrize("size", [(1000, 512, 384, 16, 4), (777, 264, 136, 64, 8), *MANY_ROWS])
@pytest.mark.parametrize("ranks", [(16, 16), (8, 40)], ids=str)
def test_large_sizes_on_cuda(size, options, of_adapters, ranks):
    """MANY_ROWS take PyTorch's grouped GEMM."""
    inputs, grads = adapted_inputs(
        *size, ranks=ranks, dtype=torch.bfloat16, device="cuda", of_adapters=of_adapters, frozen=True,
        transposed=options.get("transposed", False),
    )  # fmt: skip
    check(inputs, grads, size[3], "cuda", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1000, 512, 384, 16, 4), MANY_ROWS[0]])
def test_graphs_without_synchronization(size):
    inputs, grads = adapted_inputs(
        *size, ranks=(16, 8), dtype=torch.bfloat16, device="cuda", of_adapters=torch.float32, frozen=True
    )

    def step():
        # A live graph of another stream would break the capture.
        return [t.detach() for t in gradients(op_of(size[3]), inputs, grads)]

    expected = check_no_synchronization(step)
    assert equal(step(), expected)
    check_replays(step, expected)
