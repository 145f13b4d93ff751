"""What the products act(gate) * up of swiglu and geglu do, against their formulas in fp64. Their files have what only one of
them does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.checks import CPU_DTYPES, RecordAddress, assert_no_worse, check_op, equal, path_taken
from tests.support.pairs import sizes_by_device


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


class Gated(NamedTuple):
    formula: Callable[..., Tensor]
    choices: list[dict[str, Any]]

    def __str__(self) -> str:
        return self.formula.__name__

    @property
    def op(self) -> Callable:
        return getattr(torch.ops.liger, f"{self}")

    @property
    def packed(self) -> Callable:
        return getattr(torch.ops.liger, f"{self}_packed")

    @property
    def linear(self) -> Callable:
        return getattr(torch.ops.liger, f"{self}_linear")


# Half of the random numbers are beyond this limit. It and many of them are numbers of bf16.
PRODUCTS = [Gated(swiglu, [{}, dict(limit=0.75)]), Gated(geglu, [dict(approximate="tanh"), dict(approximate="none")])]
each = pytest.mark.parametrize("product", PRODUCTS, ids=str)
# Widths on both sides of every tile boundary in the variant table and of the CPU loop lengths (512 and 8192), model
# widths that are not powers of two, and odd widths that no vector length divides.
SIZES = [1, 7, 33, 64, 72, 130, 256, 264, 512, 520, 1000, 1024, 1032, 2048, 5504, 8192, 8200, 14336, 40001]
# Below and above both loop lengths.
CPU_SIZES = [1, 33, 520, 8200]


def make(shape, dtype, device):
    gate, up = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    return gate, up, torch.randn(shape, dtype=dtype, device=device)


def parameters_of_linear(n, rows, dtype, device):
    """weight: (24, n), bias: (24,), and the gradient of the layer's output: (*rows, 24)."""
    weight = (torch.randn(24, n, dtype=dtype, device=device) / n**0.5).requires_grad_()
    bias = torch.randn(24, dtype=dtype, device=device, requires_grad=True)
    return weight, bias, torch.randn(*rows, 24, dtype=dtype, device=device)


def halves(gate_up: Tensor) -> tuple[Tensor, ...]:
    return gate_up.chunk(2, -1)


@each
@sizes_by_device(cpu=CPU_SIZES, cuda=SIZES, dtype=CPU_DTYPES)
def test_sizes(product, n, dtype, device):
    gate, up, grad = make((3, n), dtype, device)
    for options in product.choices:
        check_op(
            lambda *t: product.op(*t, **options), lambda *t: product.formula(*t, **options), [gate, up], [grad], device
        )


@each
@sizes_by_device(cpu=CPU_SIZES, cuda=SIZES, dtype=CPU_DTYPES)
def test_packed_sizes(product, n, dtype, device):
    gate_up = torch.randn(3, 2 * n, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(3, n, dtype=dtype, device=device)
    for options in product.choices:
        check_op(
            lambda t: product.packed(t, **options), lambda t: product.formula(*halves(t), **options), [gate_up], [grad],
            device,
        )  # fmt: skip


@each
@sizes_by_device(cpu=[1, 130], cuda=[1, 64, 130, 1000, 2048, 8200], dtype=CPU_DTYPES)
def test_linear_sizes(product, n, dtype, device):
    gate, up, _ = make((3, n), dtype, device)
    weight, bias, grad = parameters_of_linear(n, (3,), dtype, device)
    for options in product.choices:
        for parameters in ([weight, bias], [weight]):
            check_op(
                lambda *t: product.linear(*t, **options),
                lambda gate, up, *parameters: F.linear(product.formula(gate, up, **options), *parameters),
                [gate, up, *parameters], [grad], device,
            )  # fmt: skip


@each
@pytest.mark.parametrize("shape", [(1, 48), (0, 48)])
@pytest.mark.library
def test_linear_of_temporaries_with_strides_that_mean_nothing(product, shape, device):
    """Copies of halves keep the strides of one row."""
    leaves = make(shape, torch.float32, device)[:2]
    weight, bias, grad = parameters_of_linear(48, shape[:-1], torch.float32, device)
    learned = [*leaves, weight, bias]
    expected = torch.autograd.grad(product.linear(*learned), learned, grad)
    out = product.linear(*(half.clone() for half in halves(torch.cat(leaves, -1))), weight, bias)
    assert equal(torch.autograd.grad(out, learned, grad), expected)


@each
@pytest.mark.library
def test_linear_saves_its_inputs_only(product, device):
    gate, up, _ = make((4, 64), torch.float32, device)
    weight, bias, _ = parameters_of_linear(64, (4,), torch.float32, device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        product.linear(gate, up, weight, bias)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in (gate, up, weight)]


@each
def test_packed_equals_the_op_on_both_halves(product, device):
    for n in (24, 96, 200, 1000, 2048, 3000, 8200):
        gate_up = torch.randn(4, 2 * n, device=device, requires_grad=True)
        grad = torch.randn(4, n, device=device)
        out, packed = product.op(*halves(gate_up)), product.packed(gate_up)
        assert torch.equal(out, packed)
        assert torch.equal(*(torch.autograd.grad(o, gate_up, grad)[0] for o in (out, packed)))


@each
def test_dense_strides_are_preserved(product, device):
    gate, up, grad = (t.detach().transpose(0, 1).requires_grad_() for t in make((5, 3, 8), torch.float32, device))
    out = product.op(gate, up)
    assert out.stride() == gate.stride()
    assert all(g.stride() == gate.stride() for g in torch.autograd.grad(out, [gate, up], grad))


@each
def test_nan_and_infinity_propagate(product, device):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1.0, -80.0, 80.0], device=device)
    gate, up = (t.reshape(-1).contiguous() for t in torch.meshgrid(special, special, indexing="ij"))
    for options in product.choices:
        # In fp64: eager's vectorized gelu(inf) is NaN on some CPUs.
        expected = product.formula(gate.double(), up.double(), **options).float()
        # The relative error of exp(-80) is the error of its argument.
        fp32 = torch.finfo(torch.float32)
        allowed = dict(atol=fp32.tiny, rtol=80 * fp32.eps)
        torch.testing.assert_close(product.op(gate, up, **options), expected, equal_nan=True, **allowed)


@each
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("form", ["op", "packed", "linear"])
@pytest.mark.library
def test_backward_overwrites_unreferenced_inputs(product, form, held, device):
    leaves, parameters, grad = [*make((4, 256), torch.float32, device)[:2]], [], torch.randn(4, 256, device=device)
    if form == "packed":
        leaves = [torch.randn(4, 512, device=device, requires_grad=True)]
    if form == "linear":
        *parameters, grad = parameters_of_linear(256, (4,), torch.float32, device)
    op, learned, seen = getattr(product, form), [*leaves, *parameters], []
    expected = torch.autograd.grad(op(*learned), learned, grad)
    inputs = [RecordAddress.apply(t, seen) for t in leaves]
    addresses, held_inputs = {t.data_ptr() for t in inputs}, inputs if held else []
    out = op(*inputs, *parameters)
    del inputs
    assert equal(torch.autograd.grad(out, learned, grad), expected)
    assert len(seen) == len(leaves) and (set(seen) == addresses) != held
    assert all(torch.equal(a, b) for a, b in zip(held_inputs, leaves))


@each
def test_a_saved_input_shared_with_another_op_is_not_overwritten(product, device):
    leaf = torch.randn(4, 64, device=device, requires_grad=True)
    x = RecordAddress.apply(leaf, [])
    total = product.op(x, x) + x.exp() * x.sin()
    del x
    expected = leaf.detach().requires_grad_()
    reference = product.op(expected, expected) + expected.exp() * expected.sin()
    pair = (torch.autograd.grad(o.sum(), i)[0] for o, i in ((total, leaf), (reference, expected)))
    assert torch.equal(*pair)


@each
def test_autocast_promotes_like_multiplication(product, device):
    gate, up, _ = make((4, 64), torch.bfloat16, device)
    with torch.autocast(device, torch.bfloat16):
        assert product.op(gate, up).dtype == product.packed(gate).dtype == torch.bfloat16
        for pair in ((gate, up.float()), (gate.float(), up)):
            assert product.op(*pair).dtype == product.formula(*pair).dtype == torch.float32


@pytest.mark.gpu
@each
@pytest.mark.parametrize("shape", [(2**31 // 4096 + 5, 4096), (2**31 + 4096,)])
def test_more_than_2_to_the_31_elements(product, shape):
    gate, up = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with path_taken("cuda"):
        out = product.op(gate, up)
    ours, *tails = (t.flatten()[-10000:] for t in (out, gate, up))
    assert_no_worse("tail", ours, product.formula(*tails), product.formula(*(t.double() for t in tails)))
    if len(shape) == 2:
        ours, last = product.packed(gate)[-7:], gate[-7:]
        assert_no_worse("packed", ours, *(product.formula(*halves(t)) for t in (last, last.double())))


# Forms of the operators, arguments, and the rule. test_wrong_calls.py has those that operators share.
X, W = torch.ones(2, 8), torch.ones(3, 8)
ERRORS = {
    "another width": ("", (X, X[:, 1:]), r"up must have the shape of gate, \[2, 8\]"),
    "an odd width": ("_packed", (X[:, 1:],), "gate_up must have an even last dimension"),
    "weight of another width": ("_linear", (X, X, W[:, 1:]), r"weight must have shape \[features, 8\]"),
    "weight of another dtype": ("_linear", (X, X, W.half()), "weight must have the dtype of gate, Float"),
    "length of bias": ("_linear", (X, X, W, torch.ones(4)), r"bias must have shape \[3\], one value per feature"),
}


@each
@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(product, case):
    form, arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"^{product}{form}: {message}.*got "):
        getattr(torch.ops.liger, f"{product}{form}")(*arguments)
