"""short_conv: torch.ops.liger.short_conv against products and torch's conv1d in fp64."""

import pytest
import torch

from tests.support.checks import CPU_DTYPES, check_op, equal, gradients, path_taken
from tests.support.families.convolutions import packed
from tests.support.oracles.causal_convolution import reference as convolved
from tests.support.pairs import pairwise, sizes_by_device

conv = torch.ops.liger.short_conv


def reference(bcx, weight, bias=None, lengths=None):
    b, c, x = bcx.chunk(3, -1)
    return c * convolved(b * x, weight, bias, activation="none", lengths=lengths)


def ours(bcx, weight, bias=None, lengths=None, cumulative=False):
    return conv(bcx, weight, bias, **packed(lengths, bcx, cumulative))


def make(batch, length, n, width, dtype, device, weight_dtype=None, with_bias=True):
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    bcx = torch.randn(batch, length, 3 * n, dtype=dtype, device=device, requires_grad=True)
    kind = dict(dtype=weight_dtype or dtype, device=device, requires_grad=True)
    weight, bias = torch.randn(n, width, **kind), torch.randn(n, **kind) if with_bias else None
    return [bcx, weight, bias], [torch.randn(batch, length, n, dtype=dtype, device=device)]


def check(inputs, grads, device, **options):
    theirs = {name: value for name, value in options.items() if name != "cumulative"}
    # Products are rounded as rows are, also beside a wider weight.
    precision = inputs[0].dtype
    check_op(
        lambda *t: ours(*t, **options), lambda *t: reference(*t, **theirs), inputs, grads, device, precision=precision
    )


@sizes_by_device(cpu=[1, 7, 130, 1000], cuda=[1, 7, 33, 72, 127, 129, 1000, 2048], dtype=CPU_DTYPES, width=range(2, 9))
def test_sizes(n, dtype, width, device):
    inputs, grads = make(2, 9, n, width, dtype, device)
    check(inputs, grads, device)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 63, 64, 65, 300])
@pytest.mark.parametrize("width", [3, 4, 7])
def test_lengths(length, width, device):
    """Both sides of the rows that a program walks over, and fewer rows than weights."""
    inputs, grads = make(2, length, 40, width, torch.float32, device)
    check(inputs, grads, device)


@pairwise(
    dtype=CPU_DTYPES,
    weight_dtype=[None, torch.float32],
    width=[2, 3, 4, 7],
    n=[24, 21],
    lengths=[None, [5, 1, 2, 4]],
    with_bias=[True, False],
)
def test_options(dtype, weight_dtype, width, n, lengths, with_bias, device):
    inputs, grads = make(2, 12, n, width, dtype, device, weight_dtype, with_bias)
    check(inputs, grads, device, lengths=lengths)


def test_cumulative_lengths(device):
    inputs, grads = make(1, 12, 24, 3, torch.float32, device)
    for lengths in ([5, 1, 2, 4], [12], [1, 11]):
        check(inputs, grads, device, lengths=lengths, cumulative=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [3, 7])
def test_samples_do_not_depend_on_their_neighbours(dtype, width, device):
    """Bit for bit, even beside infinite rows; gradients too."""
    (bcx, weight, bias), (grad,) = make(1, 11, 24, width, dtype, device)
    alone = gradients(lambda t: ours(t, weight, bias), [bcx[:, 4:9].detach().requires_grad_()], [grad[:, 4:9]])
    hostile = bcx.detach().clone()
    hostile[:, :4], hostile[:, 9:] = float("inf"), float("nan")
    packed = gradients(lambda t: ours(t, weight, bias, [4, 5, 2]), [hostile.requires_grad_()], [grad])
    assert equal(alone, [t[:, 4:9] for t in packed])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_roundings(dtype, weight_dtype, device):
    """Results equal the formula's except where sums in another order round to the other neighbour."""
    (bcx, weight, bias), _ = make(2, 64, 64, 3, dtype, device, weight_dtype)
    b, c, x = bcx.chunk(3, -1)
    v = convolved((b * x).double(), weight.double(), bias.double(), activation="none").to(dtype)
    assert (ours(bcx, weight, bias) != c * v).double().mean() < 0.02


def test_no_columns(device):
    inputs, grads = make(2, 4, 0, 3, torch.float32, device)
    assert [t.shape for t in gradients(ours, inputs, grads)] == [(2, 4, 0), *(t.shape for t in inputs)]


@pytest.mark.gpu
def test_gradients_are_deterministic():
    inputs, grads = make(3, 2000, 1000, 3, torch.bfloat16, "cuda")
    first = gradients(ours, inputs, grads)
    assert all(equal(gradients(ours, inputs, grads), first) for _ in range(3))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 4096
    bcx = torch.randn(1, 2**31 // (3 * n) + 5, 3 * n, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, 3, device="cuda", dtype=torch.bfloat16)
    with path_taken("cuda"):
        y = ours(bcx, weight)
    assert torch.equal(y[:, -8:], ours(bcx[:, -10:].clone(), weight)[:, -8:])


X, W, IDS = torch.ones(2, 4, 24), torch.ones(8, 4), torch.zeros(2, 4, dtype=torch.long)
# The rules that it shares with causal_conv1d are tested there.
ERRORS = {
    "flat bcx": (lambda: (X[0], W), {}, r"bcx must have shape \(B, S, 3 \* C\)"),
    "columns of no third": (lambda: (X[..., 1:], W), {}, r"bcx must have shape \(B, S, 3 \* C\)"),
    "cu_seqlens of batches": (lambda: (X, W), dict(cu_seqlens=IDS[0]), "bcx must have a batch of 1 beside cu_seqlens"),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    arguments, options, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"short_conv: {message}.*got "):
        conv(*arguments(), **options)
