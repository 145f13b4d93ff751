"""fp8_projections against its formula, and bit for bit against fp8_linear of stacked weights."""

import pytest
import torch
from checks import CPU_DTYPES, HALF_TYPES, check_op, path_taken
from fp8_recipes import RECIPES, fitting
from pairs import pairwise
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import noise_of

pytestmark = pytest.mark.usefixtures("needs_fp8")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
FEATURES = (144, 16, 32)


def make(
    device, dtype=torch.float32, tokens=(2, 37), n=64, features=FEATURES, recipe="rows"
) -> tuple[Tensor, list, list, Tensor]:
    """x, weights, biases and dy, whose magnitudes differ from one projection to the next, of at least these sizes."""
    torch.manual_seed(0)
    n, features = fitting(n, recipe), [fitting(m, recipe) for m in features]
    size = [10.0**i for i in range(-1, len(features) - 1)]
    x = torch.randn(*tokens, n, device=device).to(dtype)
    weights = [(s * torch.randn(m, n, device=device)).to(dtype) for m, s in zip(features, size)]
    biases = [torch.randn(m, device=device).to(dtype) for m in features]
    dy = torch.cat([s * torch.randn(*tokens, m, device=device) for m, s in zip(features, size)], -1).to(dtype)
    return x, weights, biases, dy


def of(function, recipe, count):
    """It takes x, weights and biases one by one."""
    return lambda x, *tensors: function(x, tensors[:count], tensors[count:], recipe=recipe)


def stacked(x, weights, biases, recipe="rows"):
    return torch.ops.liger.fp8_linear(x, torch.cat([*weights]), torch.cat([*biases]) if biases else None, recipe=recipe)


@pairwise(
    dtype=CPU_DTYPES, recipe=RECIPES, has_bias=[False, True], tokens=[(1,), (2, 37), (48,)],
    features=[(16,), FEATURES, (16, 0, 48)],
)  # fmt: skip
def test_the_formula(dtype, recipe, has_bias, tokens, features, device):
    x, weights, biases, dy = make(device, dtype, tokens, 64, features, recipe)
    tensors = [t.requires_grad_() for t in (x, *weights, *(biases if has_bias else []))]
    ours, formula = (
        of(f, recipe, len(features)) for f in (torch.ops.liger.fp8_projections, F.fp8_projections.reference)
    )
    check_op(ours, formula, tensors, [dy], device, noise=noise_of("fp8_projections", device))


@each_recipe
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_same_bits_as_of_stacked_weights(recipe, dtype, has_bias, device):
    x, weights, biases, dy = make(device, dtype, recipe=recipe)
    leaves = [t.requires_grad_() for t in (x, *weights, *(biases if has_bias else []))]
    y, expected = (of(f, recipe, len(FEATURES))(*leaves) for f in (F.fp8_projections, stacked))
    found, others = (torch.autograd.grad(out, leaves, dy) for out in (y, expected))
    # GEMMs of other sizes sum in another order.
    rounding = torch.finfo(dtype).eps + 2**-20 * x.shape[-1] + (2**-8 if device == "cuda" else 0)
    for a, b in zip((y, *found), (expected, *others)):
        assert a.dtype == b.dtype and float((a - b).norm()) <= rounding * float(b.norm())


def test_quantised_stack(device):
    """Of operands that one GEMM takes: exact products show whether scales are those of stacked weights."""
    x = torch.eye(64, device=device)
    _, weights, _, _ = make(device)
    # The columns of the stack, through the gradient of x.
    of_stack = F.quantize_columns(torch.cat(weights))
    x = x.requires_grad_()
    y = F.fp8_projections(x, weights, [])
    one = torch.zeros_like(y)
    one.view(64, -1)[0, 150] = 448.0
    (dx,) = torch.autograd.grad(y, x, one)
    expected = of_stack[0].float()[:, 150] * of_stack[1][:, 0] * 448
    torch.testing.assert_close(dx[0], expected, rtol=2**-20, atol=0)


@each_recipe
@pytest.mark.parametrize("learned", [(0,), (1,), (2, 3), (4,), (0, 3, 6), (1, 5)])
def test_frozen_tensors(recipe, learned, device):
    """0: x, 1 to 3: weights, 4 to 6: biases. The gradients of the others are the same bits."""
    x, weights, biases, dy = make(device, recipe=recipe)
    call = of(torch.ops.liger.fp8_projections, recipe, len(FEATURES))
    every = [t.clone().requires_grad_() for t in (x, *weights, *biases)]
    full = torch.autograd.grad(call(*every), every, dy)
    some = [t.clone().requires_grad_(i in learned) for i, t in enumerate((x, *weights, *biases))]
    found = torch.autograd.grad(call(*some), [some[i] for i in learned], dy)
    assert all(torch.equal(a, full[i]) for a, i in zip(found, learned))


def test_x_is_kept_once(device):
    x, weights, biases, _ = make(device, torch.bfloat16, (48,))
    leaves = [t.requires_grad_() for t in (x, *weights, *biases)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        of(F.fp8_projections, "rows", len(FEATURES))(*leaves)
    pointers = {weight.data_ptr() for weight in weights}
    assert sum(t.nbytes for t in kept if t.data_ptr() not in pointers) == 48 * 64 + 2 * 64 * 4


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_autocast(dtype, device):
    x, weights, biases, _ = make(device)
    with torch.autocast(device, dtype):
        y = F.fp8_projections(x, weights, biases)
    low = ([t.to(dtype) for t in ts] for ts in (weights, biases))
    assert y.dtype == dtype and torch.equal(y, F.fp8_projections(x.to(dtype), *low))


@each_recipe
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(recipe, use_reentrant, device):
    x, weights, biases, dy = make(device, recipe=recipe)
    call = of(torch.ops.liger.fp8_projections, recipe, len(FEATURES))
    leaves = [t.requires_grad_() for t in (x, *weights, *biases)]
    expected = torch.autograd.grad(call(*leaves), leaves, dy)
    torch.utils.checkpoint.checkpoint(call, *leaves, use_reentrant=use_reentrant).backward(dy)
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, expected))


@each_recipe
def test_empty(recipe, device):
    x, weights, biases, dy = make(device, tokens=(2, 0), recipe=recipe)
    leaves = [t.requires_grad_() for t in (x, *weights, *biases)]
    of(torch.ops.liger.fp8_projections, recipe, len(FEATURES))(*leaves).backward(dy)
    assert x.grad.shape == x.shape and not any(t.grad.any() for t in leaves[1:])


def test_path(device):
    x, weights, biases, _ = make(device)
    with path_taken(device):
        F.fp8_projections(x, weights, biases)


def test_double_backward_is_refused(device):
    x, weights, _, dy = make(device)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(F.fp8_projections(x, weights, []), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="fp8_projections: double backward is not supported"):
        dx.sum().backward()


def wrong(**changes):
    x, weights, biases, _ = make("cpu")
    given = dict(x=x, weights=weights, biases=biases) | changes
    return lambda: F.fp8_projections(**given)


ONES = torch.ones(96, 64)
ERRORS = {
    "none": (wrong(weights=[], biases=[]), "weights must have an entry"),
    "features of x": (wrong(x=torch.ones(2, 24)), "features of x must be a multiple of 16"),
    "features": (wrong(weights=[ONES, ONES[:40]], biases=[]), r"features of weights\[1\] must be a multiple of 16"),
    "shape": (wrong(weights=[ONES, torch.ones(16, 32)], biases=[]), r"weights\[1\] must have shape \[features, 64\]"),
    "vector": (wrong(weights=[ONES[0]], biases=[]), r"weights\[0\] must have two dimensions"),
    "number of biases": (wrong(biases=[ONES[:, 0]]), "biases must be empty or have as many entries as weights, 3"),
    "bias": (wrong(weights=[ONES], biases=[torch.ones(64)]), r"biases\[0\] must have shape \[96\]"),
    "dtype": (wrong(weights=[ONES.half()], biases=[]), r"weights\[0\] must have the dtype of x"),
    "recipe": (wrong(recipe="columns"), "recipe must be 'rows', 'rows_hp', 'tensor' or 'blocks'"),
    "features in blocks": (
        wrong(recipe="blocks", x=torch.ones(2, 128), weights=[torch.ones(64, 128)], biases=[]),
        r"features of weights\[0\] must be a multiple of 128 with the recipe 'blocks'",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"fp8_projections: {message}.*got "):
        call()
