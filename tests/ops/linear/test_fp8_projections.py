"""fp8_projections against its formula."""

import pytest
import torch
from torch import Tensor

from liger_ops import functional as F
from liger_ops._accuracy import noise_of
from liger_ops.reference.fp8_projections import RECIPES
from tests.support.checks import CPU_DTYPES, check_op
from tests.support.families.fp8 import fitting
from tests.support.pairs import pairwise

pytestmark = pytest.mark.usefixtures("needs_fp8")
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


def test_x_is_kept_once(device):
    x, weights, biases, _ = make(device, torch.bfloat16, (48,))
    leaves = [t.requires_grad_() for t in (x, *weights, *biases)]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        of(F.fp8_projections, "rows", len(FEATURES))(*leaves)
    pointers = {weight.data_ptr() for weight in weights}
    assert sum(t.nbytes for t in kept if t.data_ptr() not in pointers) == 48 * 64 + 2 * 64 * 4


ERRORS = {
    "none": (dict(x=(2, 64), weights=[]), "weights must have an entry"),
    "features of x": (dict(x=(2, 24), weights=[(96, 24)]), "features of x must be a multiple of 16"),
    "features": (dict(x=(2, 64), weights=[(96, 64), (40, 64)]), r"features of weights\[1\] must be a multiple of 16"),
    "number of biases": (
        dict(x=(2, 64), weights=[(96, 64), (96, 64)], biases=[(96,)]),
        "biases must be empty or have as many entries as weights, 2",
    ),
    "features in blocks": (
        dict(recipe="blocks", x=(2, 128), weights=[(64, 128)]),
        r"features of weights\[0\] must be a multiple of 128 with the recipe 'blocks'",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    """Others are in test_wrong_calls.py."""
    given, message = ERRORS[case]
    weights, biases = (list(map(torch.ones, given.get(name, []))) for name in ("weights", "biases"))
    with pytest.raises(RuntimeError, match=f"fp8_projections: {message}.*got "):
        F.fp8_projections(torch.ones(given["x"]), weights, biases, recipe=given.get("recipe", "rows"))
