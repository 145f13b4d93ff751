"""xielu against its formula in fp64."""

import math

import pytest
import torch
from torch import Tensor, nn

from liger_ops import functional as F
from tests.support.checks import CPU_DTYPES, HALF_TYPES, assert_no_worse, check_op, sizes_around_tiles
from tests.support.pairs import sizes_by_device

xielu = torch.ops.liger.xielu
BETA, EPS = 0.5, -1e-6


def reference(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = BETA, eps: float = EPS) -> Tensor:
    """As transformers' XIELUActivation."""
    p, m = nn.functional.softplus(alpha_p), beta + nn.functional.softplus(alpha_n)
    low = torch.expm1(torch.clamp(x, max=eps)) - x
    return torch.where(x > 0, p * x * x + beta * x, low * m + beta * x)


def assert_digits_are_as_in_eager(x, numbers, eager, exact):
    """Relative to each element, however small it is. exact: in fp64."""
    ours, theirs = ((f(x, *numbers).double() / exact).nan_to_num(1.0) for f in (xielu, eager))
    assert_no_worse("digits", ours, theirs, torch.ones_like(exact), noise=torch.finfo(x.dtype).eps)


def make(shape, dtype, device, alphas=None) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    x, dy = (2 * torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    numbers = [torch.tensor([v], device=device, dtype=alphas or dtype) for v in (0.2, -1.1)]
    return [t.requires_grad_() for t in (x, *numbers)], [dy]


@sizes_by_device(
    cpu=[1, 7, 2560],
    cuda=[1, 7, 131, 2560, *sizes_around_tiles("xielu_fwd", "xielu_bwd")],
    dtype=CPU_DTYPES,
)
def test_sizes(n, dtype, device):
    for shape in ((n,), (3, n), (2, 5, n)):
        check_op(xielu, reference, *make(shape, dtype, device), device)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_numbers_in_fp32(dtype, device):
    check_op(
        xielu, lambda *args: reference(*args).to(args[0].dtype), *make((5, 320), dtype, device, torch.float32), device
    )


@pytest.mark.parametrize("options", [dict(beta=0.0), dict(beta=-0.25), dict(eps=-0.75), dict(eps=0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options(options, dtype, device):
    inputs, grads = make((7, 96), dtype, device)
    check_op(
        lambda *args: xielu(*args, **options), lambda *args: reference(*args, **(dict(beta=BETA, eps=EPS) | options)),
        inputs, grads, device,
    )  # fmt: skip


@pytest.mark.parametrize("alphas", [(-30.0, -30.0), (30.0, 19.0), (0.0, -8.0)])
def test_all_sizes_of_numbers(alphas, device):
    """Large and small numbers, for x from 1e-30 to 1e4 on both sides of zero."""
    x = torch.logspace(-30, 4, 300, device=device)
    x = torch.cat([x, -x, torch.zeros(2, device=device)])
    numbers = [torch.tensor([v], device=device) for v in alphas]
    exact = F.xielu.reference(x.double(), *(t.double() for t in numbers))
    # The plain formula in fp32, which loses no digits either.
    assert_digits_are_as_in_eager(x, numbers, F.xielu.reference, exact)


def test_small_numbers_keep_their_digits(device):
    """Near zero expm1(x) - x loses its digits in eager fp32 too, but it is small beside beta x."""
    x = -torch.logspace(-9, 1, 4000, device=device)
    numbers = [torch.tensor([v], device=device) for v in (0.2, 3.0)]
    exact = reference(x.double(), *(t.double() for t in numbers))
    assert_digits_are_as_in_eager(x, numbers, reference, exact)


def test_nan_and_infinity(device):
    _, *numbers = make((1,), torch.float32, device)[0]
    x = torch.tensor([math.nan, -math.inf, math.inf, -0.0, -1.0, 2.0], device=device, requires_grad=True)
    ours, (dx,) = F.xielu(x, *numbers), torch.autograd.grad(F.xielu(x, *numbers).sum(), [x])
    expected = reference(x, *numbers)
    expected[1] = math.inf  # instead of infinity less infinity
    torch.testing.assert_close(ours, expected, equal_nan=True)
    assert dx[0].isnan() and dx[2] == math.inf and not dx[3:].isnan().any()


def test_sums_over_many_elements(device):
    """The numbers' gradients are as exact as sums in fp64, and the same in every run."""
    torch.manual_seed(0)
    x, dy = (torch.randn(400, 1030, device=device) for _ in range(2))
    numbers = [torch.tensor([v], device=device, requires_grad=True) for v in (0.2, -1.1)]
    first, second = (torch.autograd.grad(xielu(x, *numbers), numbers, dy) for _ in range(2))
    exact = [t.detach().double().requires_grad_() for t in numbers]
    truth = torch.autograd.grad(reference(x.double(), *exact), exact, dy.double())
    terms = torch.autograd.grad(reference(x.double(), *exact), exact, dy.double().abs() * x.double().sign().abs())
    for a, b, t, size in zip(first, second, truth, terms):
        assert torch.equal(a, b)
        assert abs(float(a) - float(t)) <= 4 * torch.finfo(torch.float32).eps * abs(float(size))


ONE = torch.ones(1)
ERRORS = {
    "two numbers": ((torch.ones(8), torch.ones(2), ONE), "alpha_p must have one element"),
    "different": ((torch.ones(8).half(), ONE, ONE.half()), "alpha_n must have the dtype of alpha_p"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    arguments, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"xielu: {message}.*got "):
        xielu(*arguments)
