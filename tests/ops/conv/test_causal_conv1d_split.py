"""causal_conv1d_split: torch.ops.liger.causal_conv1d_split against cat, torch's conv1d, silu and split in fp64."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.checks import CPU_DTYPES, check_op, equal, gradients, like, path_taken
from tests.support.families.convolutions import packed
from tests.support.host.allocations import allocations
from tests.support.oracles.causal_convolution import reference as convolved
from tests.support.pairs import pairwise

split = torch.ops.liger.causal_conv1d_split
# Of q, k, v and z, and the groups: as in Qwen3-Next, without z, side by side, and with columns that align with nothing.
LAYOUT = {
    "qwen3_next": ([128, 128, 256, 256], 2),
    "equal": ([16, 16, 16, 16], 3),
    "without z": ([8, 8, 24], 2),
    "one group": ([24, 24, 48, 48], 1),
    "qkv": ([40, 40, 80], 1),
    "odd": ([3, 5, 7, 2], 3),
    "without k": ([8, 0, 8, 8], 2),
    "wide": ([1024, 1024, 512, 8], 1),
}


def columns(x, sizes, groups):
    return x.unflatten(2, (groups, sum(sizes))).split([*sizes, 0][:4], 3)


def reference(x, weight, bias=None, state=None, sizes=(), groups=1, **options):
    *parts, z = columns(x, sizes, groups)
    y = convolved(torch.cat([part.flatten(2) for part in parts], 2), weight, bias, state, **options)
    return *y.split([groups * size for size in sizes[:3]], 2), z


def ours(x, weight, bias=None, state=None, sizes=(), groups=1, activation="silu", dilation=1, lengths=None):
    options = dict(sizes=sizes, groups=groups, dilation=dilation, initial_state=state)
    return split(x, weight, bias, activation, **options, **packed(lengths, x))


def make(batch, length, sizes, groups, width, dtype, device, weight_dtype=None, past=None, with_bias=True):
    torch.manual_seed(0)  # compared rounding errors must not depend on which tests ran before
    rows, n = dict(dtype=dtype, device=device), groups * sum(sizes[:3])
    kind = dict(dtype=weight_dtype or dtype, device=device, requires_grad=True)
    x = torch.randn(batch, length, groups * sum(sizes), **rows, requires_grad=True)
    weight, bias = torch.randn(n, width, **kind), torch.randn(n, **kind) if with_bias else None
    state = past and torch.randn(batch, past, n, **rows, requires_grad=True)
    shapes = [(batch, length, groups * size) for size in sizes[:3]] + [(batch, length, groups, [*sizes, 0][3])]
    return [x, weight, bias, state], [torch.randn(shape, **rows) for shape in shapes]


def check(inputs, grads, device, **options):
    check_op(lambda *t: ours(*t, **options), lambda *t: reference(*t, **options), inputs, grads, device)


@pairwise(layout=LAYOUT, dtype=CPU_DTYPES, width=[2, 4, 7])
def test_layouts_of_columns(layout, dtype, width, device):
    sizes, groups = LAYOUT[layout]
    inputs, grads = make(2, 9, sizes, groups, width, dtype, device)
    check(inputs, grads, device, sizes=sizes, groups=groups)


@pairwise(
    dtype=CPU_DTYPES,
    weight_dtype=[None, torch.float32],
    width=[3, 4],
    activation=["silu", "none"],
    dilation=[1, 2],
    lengths=[None, [5, 1, 2, 4]],
    with_state=[True, False],
    with_bias=[True, False],
)
def test_options(dtype, weight_dtype, width, activation, dilation, lengths, with_state, with_bias, device):
    sizes, groups, past = [8, 8, 16, 16], 3, (width - 1) * dilation if with_state else None
    inputs, grads = make(2, 12, sizes, groups, width, dtype, device, weight_dtype, past, with_bias)
    options = dict(sizes=sizes, groups=groups, activation=activation, dilation=dilation, lengths=lengths)
    check(inputs, grads, device, **options)


@pytest.mark.parametrize("layout", LAYOUT)
def test_equals_the_convolution_bit_for_bit(layout, device):
    """Of columns in order; samples by their ends."""
    sizes, groups = LAYOUT[layout]
    (x, weight, bias, _), _ = make(1, 33, sizes, groups, 4, torch.bfloat16, device)
    ends = torch.tensor([0, 4, 20, 33], device=device)
    *found, z = split(x, weight, bias, sizes=sizes, groups=groups, cu_seqlens=ends)
    *parts, rest = columns(x, sizes, groups)
    y = torch.ops.liger.causal_conv1d(torch.cat([part.flatten(2) for part in parts], 2), weight, bias, cu_seqlens=ends)
    assert equal(found, y.split([groups * size for size in sizes[:3]], 2)) and torch.equal(z, rest)


def test_results_are_contiguous_and_z_is_a_view(device):
    (x, weight, bias, _), _ = make(2, 9, [8, 8, 16, 16], 2, 4, torch.float32, device)
    options = dict(sizes=[8, 8, 16, 16], groups=2)
    q, k, v, z = split(x, weight, bias, **options)
    assert all(t.is_contiguous() and not t._is_view() for t in (q, k, v))
    assert z.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and z.shape == (2, 9, 2, 16)
    assert z.requires_grad and not split(x.detach(), weight, bias, **options)[3].requires_grad
    with torch.no_grad():
        assert split(x, weight, bias, **options)[3]._is_view()


@pairwise(q=[True, False], k=[True, False], v=[True, False], z=[True, False])
def test_upstream_gradients_that_are_missing(q, k, v, z, device):
    options = dict(sizes=[8, 8, 16, 16], groups=2)
    inputs, grads = make(2, 9, [8, 8, 16, 16], 2, 4, torch.float32, device)
    kept = [i for i, used in enumerate((q, k, v, z)) if used]
    if not kept:
        return

    def some(function):
        return lambda *t: [function(*t, **options)[i] for i in kept]

    wanted = [t for t in inputs if t is not None]
    found = torch.autograd.grad(some(ours)(*inputs), wanted, [grads[i] for i in kept], allow_unused=True)
    full = [grad if i in kept else torch.zeros_like(grad) for i, grad in enumerate(grads)]
    expected = gradients(lambda *t: ours(*t, **options), inputs, full)[4:]
    for t, other in zip(found, expected):
        assert torch.equal(torch.zeros_like(other) if t is None else t, other)


def test_backward_writes_one_buffer(device):
    """No gradient of x's size beside the one that is returned: z's is written into it."""
    sizes = [64, 64, 128, 128]
    (x, weight, _, _), grads = make(2, 64, sizes, 2, 4, torch.float32, device, with_bias=False)
    results = split(x, weight, sizes=sizes, groups=2)
    assert len({t.grad_fn.name() for t in results}) == 1

    def backward():
        (found,) = torch.autograd.grad(results, x, grads, retain_graph=True)
        assert torch.equal(columns(found, sizes, 2)[3], grads[3])

    # On CPU the convolution's own rows have an order of their own.
    whole = [size for size in allocations(backward) if size >= x.nbytes]
    assert len(whole) == 1, whole


def test_views_of_x_are_not_written_to(device):
    (x, weight, bias, _), grads = make(2, 9, [8, 8, 16, 16], 2, 4, torch.float32, device)
    *_, z = split(x, weight, bias, sizes=[8, 8, 16, 16], groups=2)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        z.mul_(2)
    rows = x * 1
    results = split(rows, weight, bias, sizes=[8, 8, 16, 16], groups=2)
    with torch.no_grad():
        results[3].mul_(2)
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        torch.autograd.grad(results, x, grads)


def test_nothing_to_convolve(device):
    x = torch.randn(2, 3, 8, device=device, requires_grad=True)
    *parts, z = split(x, torch.ones(0, 4, device=device), sizes=[0, 0, 0, 4], groups=2)
    assert all(t.shape == (2, 3, 0) for t in parts) and torch.equal(z.flatten(2), x)
    assert (torch.autograd.grad(z.sum(), x)[0] == 1).all()


def test_below_a_checkpoint(device):
    options = dict(sizes=[8, 8, 16, 16], groups=2)
    inputs, grads = make(2, 9, [8, 8, 16, 16], 2, 4, torch.float32, device)
    plain = gradients(lambda *t: ours(*t, **options), inputs, grads)

    def again(*t):
        return checkpoint(lambda *t: ours(*t, **options), *t, use_reentrant=False)

    assert equal(gradients(again, [like(t) for t in inputs], grads), plain)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    sizes, groups = [512, 512, 1024, 1024], 2
    n = groups * sum(sizes)
    x = torch.randn(1, 2**31 // n + 5, n, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(groups * sum(sizes[:3]), 4, device="cuda", dtype=torch.bfloat16)
    with path_taken("cuda"):
        found = split(x, weight, sizes=sizes, groups=groups)
    tail = split(x[:, -10:].clone(), weight, sizes=sizes, groups=groups)
    assert equal([t[:, -7:] for t in found], [t[:, -7:] for t in tail])


X, W = torch.ones(2, 4, 8), torch.ones(6, 4)
SIZES = dict(sizes=[1, 1, 1, 1], groups=2)
ERRORS = {
    "two sizes": (lambda: (X, W), dict(sizes=[4, 4]), "sizes must be 3 or 4 numbers of columns: of q, k, v and z"),
    "negative size": (lambda: (X, W), dict(sizes=[4, 4, 1, -1]), "sizes must be 3 or 4 numbers of columns"),
    "no group": (lambda: (X, W), dict(sizes=[1, 1, 1, 1], groups=0), "groups must be positive"),
    "other columns": (lambda: (X, W), dict(sizes=[1, 1, 1, 1]), r"x must have groups \* sum\(sizes\) = 4 columns"),
    "weight of all columns": (lambda: (X, torch.ones(8, 4)), SIZES, r"weight must have shape \[6, W\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.library
def test_errors(case):
    arguments, options, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"causal_conv1d_split: {message}.*got "):
        split(*arguments(), **options)
