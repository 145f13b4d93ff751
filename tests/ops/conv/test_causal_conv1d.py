"""causal_conv1d: torch.ops.liger.causal_conv1d against torch's conv1d and silu in fp64."""

import pytest
import torch
from torch.nn import functional

from tests.support.checks import CPU_DTYPES, assert_no_worse, check_op, equal, gradients, path_taken, sizes_around_tiles
from tests.support.families.convolutions import packed
from tests.support.oracles.causal_convolution import reference
from tests.support.pairs import pairwise, sizes_by_device

conv = torch.ops.liger.causal_conv1d
KERNELS = "causal_conv1d_fwd", "causal_conv1d_bwd"


def ours(x, weight, bias=None, state=None, activation="silu", dilation=1, lengths=None, cumulative=False):
    samples = packed(lengths, x, cumulative)
    return conv(x, weight, bias, activation, dilation=dilation, initial_state=state, **samples)


def make(shape, width, dtype, device, weight_dtype=None, past=None, with_bias=True):
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    kind = dict(dtype=weight_dtype or dtype, device=device, requires_grad=True)
    weight, bias = torch.randn(shape[2], width, **kind), torch.randn(shape[2], **kind) if with_bias else None
    state = past and torch.randn(shape[0], past, shape[2], dtype=dtype, device=device, requires_grad=True)
    return [x, weight, bias, state], [torch.randn(shape, dtype=dtype, device=device)]


def check(inputs, grads, device, **options):
    theirs = {name: value for name, value in options.items() if name != "cumulative"}
    check_op(lambda *t: ours(*t, **options), lambda *t: reference(*t, **theirs), inputs, grads, device)


SIZES = sorted({1, 7, 33, 72, 1000, 8192, *sizes_around_tiles(*KERNELS)})


@sizes_by_device(cpu=[1, 7, 130, 1000], cuda=SIZES, dtype=CPU_DTYPES, width=range(2, 9))
def test_sizes(n, dtype, width, device):
    inputs, grads = make((2, 9, n), width, dtype, device)
    check(inputs, grads, device)


@pytest.mark.parametrize("length", [1, 2, 3, 127, 128, 129, 300])
@pytest.mark.parametrize("dilation", [1, 3])
def test_lengths(length, dilation, device):
    """Both sides of the rows that a program walks over, and fewer rows than the state has."""
    inputs, grads = make((2, length, 40), 4, torch.float32, device, past=3 * dilation)
    check(inputs, grads, device, dilation=dilation)


@pairwise(
    dtype=CPU_DTYPES,
    weight_dtype=[None, torch.float32],
    width=[2, 4, 7],
    activation=["silu", "none"],
    dilation=[1, 2],
    lengths=[None, [5, 1, 2, 4]],
    with_state=[True, False],
    with_bias=[True, False],
)
def test_options(dtype, weight_dtype, width, activation, dilation, lengths, with_state, with_bias, device):
    past = (width - 1) * dilation if with_state else None
    inputs, grads = make((2, 12, 24), width, dtype, device, weight_dtype, past, with_bias)
    check(inputs, grads, device, activation=activation, dilation=dilation, lengths=lengths)


def test_cumulative_lengths(device):
    inputs, grads = make((1, 12, 24), 4, torch.float32, device, past=3)
    for lengths in ([5, 1, 2, 4], [12], [1, 11]):
        check(inputs, grads, device, lengths=lengths, cumulative=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_samples_do_not_depend_on_their_neighbours(dtype, device):
    """Bit for bit, even beside infinite rows; gradients too."""
    (x, weight, bias, _), (grad,) = make((1, 11, 24), 4, dtype, device)
    alone = gradients(lambda x: ours(x, weight, bias), [x[:, 4:9].detach().requires_grad_()], [grad[:, 4:9]])
    hostile = x.detach().clone()
    hostile[:, :4], hostile[:, 9:] = float("inf"), float("nan")
    packed = gradients(lambda x: ours(x, weight, bias, lengths=[4, 5, 2]), [hostile.requires_grad_()], [grad])
    assert equal(alone, [t[:, 4:9] for t in packed])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_roundings(dtype, weight_dtype, device):
    """Results equal the formula's except where sums in another order round to the other neighbour."""
    (x, weight, bias, _), _ = make((2, 64, 64), 4, dtype, device, weight_dtype)
    y = reference(x.double(), weight.double(), bias.double(), activation="none")
    y = y.to(dtype).double() if weight_dtype is None else y
    assert (ours(x, weight, bias) != functional.silu(y).to(dtype)).double().mean() < 0.02


def test_the_state_continues_a_sequence(device):
    (x, weight, bias, _), _ = make((2, 12, 24), 4, torch.bfloat16, device)
    whole = ours(x, weight, bias)
    assert torch.equal(ours(x[:, 5:], weight, bias, x[:, 2:5]), whole[:, 5:])


def test_no_columns(device):
    inputs, grads = make((2, 4, 0), 4, torch.float32, device, past=3)
    assert [t.shape for t in gradients(ours, inputs, grads)] == [(2, 4, 0), *(t.shape for t in inputs)]


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    n = 4096
    x = torch.randn(1, 2**31 // n + 5, n, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, 4, device="cuda", dtype=torch.bfloat16)
    with path_taken("cuda"):
        y = ours(x, weight)
    tail = x[:, -10:]
    wide = reference(tail.double(), weight.double())
    assert_no_worse("tail", y[:, -7:], reference(tail, weight)[:, -7:], wide[:, -7:])


X, W, IDS = torch.ones(2, 4, 8), torch.ones(8, 4), torch.zeros(2, 4, dtype=torch.long)


def ends(*numbers):
    return torch.tensor(numbers)


ERRORS = {
    "flat x": (lambda: (X[0], W), {}, r"x must have shape \(B, S, C\)"),
    "weight of other columns": (lambda: (X, W[:7]), {}, r"weight must have shape \[8, W\]"),
    "narrow weight": (lambda: (X, W[:, :1]), {}, "weight must have 2 to 8 columns"),
    "wide weight": (lambda: (X, W.repeat(1, 3)), {}, "weight must have 2 to 8 columns"),
    "bias of another shape": (lambda: (X, W, W[0]), {}, r"bias must have shape \[8\]"),
    "unknown activation": (lambda: (X, W, None, "gelu"), {}, "activation must be 'silu' or 'none'"),
    "dilation of zero": (lambda: (X, W), dict(dilation=0), "dilation must be positive"),
    "seq_idx of another shape": (lambda: (X, W), dict(seq_idx=IDS[:1]), r"seq_idx must have shape \[2, 4\]"),
    "both kinds of samples": (
        lambda: (X, W), dict(seq_idx=IDS, cu_seqlens=IDS[0]), "cu_seqlens must be None beside seq_idx",
    ),
    "cu_seqlens of batches": (lambda: (X, W), dict(cu_seqlens=IDS[0]), "x must have a batch of 1 beside cu_seqlens"),
    "cu_seqlens without an entry": (
        lambda: (X[:1], W), dict(cu_seqlens=IDS[0, :0]), "cu_seqlens must have one dimension, with an entry",
    ),
    "cu_seqlens that begin late": (lambda: (X[:1], W), dict(cu_seqlens=ends(1, 4)), "cu_seqlens must begin with 0"),
    "cu_seqlens that end early": (lambda: (X[:1], W), dict(cu_seqlens=ends(0, 3)), "cu_seqlens must end with 4"),
    "descending cu_seqlens": (lambda: (X[:1], W), dict(cu_seqlens=ends(0, 3, 2, 4)), "cu_seqlens must not descend"),
    "state of another length": (
        lambda: (X, W), dict(initial_state=X), r"initial_state must have shape \[2, 3, 8\]",
    ),
}  # fmt: skip


@pytest.mark.library
def test_numbers_of_samples_that_differ_beyond_32_bits():
    ids = torch.tensor([[0, 0, 2**32, 2**32]] * 2)
    with pytest.raises(IndexError, match=rf"causal_conv1d: seq_idx must lie in \[-{2**31}, {2**31}\) \(got {2**32}\)"):
        conv(X, W, seq_idx=ids)


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    arguments, options, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"causal_conv1d: {message}.*got "):
        conv(*arguments(), **options)
