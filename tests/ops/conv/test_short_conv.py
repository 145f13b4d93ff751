"""short_conv: torch.ops.liger.short_conv against products and torch's conv1d in fp64."""

import pytest
import torch
from causal_convolution import reference as convolved
from checks import CPU_DTYPES, LAYOUTS, check_op, equal, gradients, like, path_taken
from pairs import pairwise, sizes_by_device
from torch.utils.checkpoint import checkpoint

conv = torch.ops.liger.short_conv


def reference(bcx, weight, bias=None, lengths=None):
    b, c, x = bcx.chunk(3, -1)
    return c * convolved(b * x, weight, bias, activation="none", lengths=lengths)


def ours(bcx, weight, bias=None, lengths=None, cumulative=False):
    packed = {}
    if lengths:
        samples = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(bcx.device)
        packed = dict(seq_idx=samples.expand(len(bcx), -1))
    if cumulative:
        packed = dict(cu_seqlens=torch.tensor([0, *lengths], device=bcx.device).cumsum(0))
    return conv(bcx, weight, bias, **packed)


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    (bcx, weight, bias), (grad,) = make(3, 8, 24, 3, torch.float32, device)
    check([LAYOUTS[layout](bcx.detach()).requires_grad_(), weight, bias], [grad], device)
    check([bcx, weight, bias], [LAYOUTS[layout](grad)], device)


@pairwise(needs_bcx=[True, False], needs_weight=[True, False], needs_bias=[True, False])
def test_only_required_gradients(needs_bcx, needs_weight, needs_bias, device):
    inputs, grads = make(2, 9, 24, 3, torch.float32, device)
    for t, needed in zip(inputs, (needs_bcx, needs_weight, needs_bias)):
        t.requires_grad_(needed)
    check(inputs, grads, device)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_empty(shape, device):
    inputs, grads = make(*shape, 3, torch.float32, device)
    found = gradients(lambda *t: ours(*t), inputs, grads)
    assert found[0].shape == shape and all((t == 0).all() for t in found)


@pairwise(width=[2, 3], lengths=[None, [2, 3]], with_bias=[True, False])
def test_gradcheck(width, lengths, with_bias):
    inputs, _ = make(2, 5, 3, width, torch.float64, "cpu", with_bias=with_bias)
    wanted = [t for t in inputs if t is not None]
    assert torch.autograd.gradcheck(lambda *t: ours(*t, lengths=lengths), wanted)


def test_autocast_casts_as_for_a_linear_layer(device):
    inputs, _ = make(2, 5, 8, 3, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        y = ours(*inputs)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in inputs)


def test_below_a_checkpoint(device):
    inputs, grads = make(2, 9, 24, 3, torch.float32, device)
    plain = gradients(ours, inputs, grads)

    def again(*t):
        return checkpoint(ours, *t, use_reentrant=False)

    assert equal(gradients(again, [like(t) for t in inputs], grads), plain)


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
ERRORS = {
    "integer bcx": (lambda: (X.long(), W), {}, "bcx must be float32, float16, bfloat16 or float64"),
    "flat bcx": (lambda: (X[0], W), {}, r"bcx must have shape \(B, S, 3 \* C\)"),
    "columns of no third": (lambda: (X[..., 1:], W), {}, r"bcx must have shape \(B, S, 3 \* C\)"),
    "weight of all columns": (lambda: (X, W.repeat(3, 1)), {}, r"weight must have shape \[8, W\]"),
    "wide weight": (lambda: (X, W.repeat(1, 3)), {}, "weight must have 2 to 8 columns"),
    "weight of another dtype": (lambda: (X, W.half()), {}, "weight must be float32 or have the dtype of bcx"),
    "bias of another shape": (lambda: (X, W, W[0]), {}, r"bias must have shape \[8\]"),
    "fractional seq_idx": (lambda: (X, W), dict(seq_idx=IDS.float()), "seq_idx must be int64 or int32"),
    "both kinds of samples": (
        lambda: (X, W), dict(seq_idx=IDS, cu_seqlens=IDS[0]), "cu_seqlens must be None beside seq_idx",
    ),
    "cu_seqlens of batches": (lambda: (X, W), dict(cu_seqlens=IDS[0]), "bcx must have a batch of 1 beside cu_seqlens"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    arguments, options, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"short_conv: {message}.*got "):
        conv(*arguments(), **options)
