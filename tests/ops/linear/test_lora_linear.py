"""lora_linear against its formula in fp64, and the projections of one input that liger_ops.adapters computes with it."""

from contextlib import nullcontext

import pytest
import torch
from checks import CPU_DTYPES, HALF_TYPES, assert_no_worse, gradients, like, path_taken, roundings
from lora_dropout import dropped, kept
from pairs import pairwise
from torch.nn import functional

from liger_ops import functional as F
from liger_ops.linear.adapters import gated_lora_projection, lora_projections, seeds_for

lora_linear = torch.ops.liger.lora_linear


def precision(x, **_):
    """Eager rounds each product, the operator some of them."""
    return x.dtype


def truncation(*sizes: int) -> float:
    """Tensor cores add 16 products at a time to a sum, which they cut off after the 24th bit."""
    return max(sizes) / 16 * 2**-23


# Of our kernels, which add the products of blocks. Beyond MOST_RANKS, cuBLAS multiplies.
TRUNCATION, MOST_RANKS = truncation(256), 32


class Case:
    """Projections of one input with an adapter each, in any dtypes."""

    def __init__(
        self, device, dtype, adapter_dtype, rows=17, n=24, features=(32, 8), ranks=(4, 3), biased=True, dropout=()
    ) -> None:
        torch.manual_seed(0)

        def make(*shape, dtype=dtype, scale=1.0):
            return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()

        count = len(ranks)
        self.of = [i % len(features) for i in range(count)]
        self.scale = [2.0, 0.5, 1.5][:count]
        self.sizes = len(features), count
        self.biased = [biased and i == 0 for i in range(len(features))]
        self.tensors = [make(rows, n), *(make(m, n, scale=max(n, 1) ** -0.5) for m in features)]
        self.tensors += [make(m) for m, has in zip(features, self.biased) if has]
        self.tensors += [make(r, n, dtype=adapter_dtype, scale=max(n, 1) ** -0.5) for r in ranks]
        self.tensors += [make(features[i], r, dtype=adapter_dtype, scale=r**-0.5) for i, r in zip(self.of, ranks)]
        self.upstream = [torch.randn(rows, m, device=device, dtype=dtype) for m in features]
        by_blocks = any(dropout) or max(ranks, default=0) <= MOST_RANKS
        noise = TRUNCATION if by_blocks else truncation(rows, n, *features)
        self.noise = noise if torch.device(device).type == "cuda" else 0.0
        self.dropout = dropout

    def parts(self, tensors):
        projections, adapters = self.sizes
        rest = iter(tensors)
        x = next(rest)
        weights = [next(rest) for _ in range(projections)]
        biases = [next(rest) if has else None for has in self.biased]
        a = [next(rest) for _ in range(adapters)]
        return x, weights, biases, a, list(rest)

    def ours(self, *tensors):
        x, weights, biases, a, b = self.parts(tensors)
        torch.manual_seed(7)
        return lora_projections(x, weights, biases, a, b, self.scale, self.of, self.dropout)

    def formula(self, *tensors):
        x, weights, biases, a, b = self.parts(tensors)
        own = [[j for j, i in enumerate(self.of) if i == p] for p in range(len(weights))]
        if any(self.dropout):
            torch.manual_seed(7)
            seeds = seeds_for(self.dropout, x.device).tolist()
            return tuple(self.with_dropout(x, w, bias, js, a, b, seeds) for w, bias, js in zip(weights, biases, own))
        return tuple(
            F.lora_linear.reference(x, w, [a[j] for j in js], [b[j] for j in js], [self.scale[j] for j in js], bias)
            for w, bias, js in zip(weights, biases, own)
        )

    def with_dropout(self, x, weight, bias, own, a, b, seeds):
        """As peft computes it."""
        y = functional.linear(x, weight, bias)
        for j in own:
            found = functional.linear(dropped(x.to(a[j].dtype), seeds[j], self.dropout[j]), a[j])
            y = y + functional.linear(found, b[j]) * self.scale[j]
        return y.to(x.dtype)

    def check(self):
        exact = gradients(self.formula, [like(t, torch.float64) for t in self.tensors], self.upstream)
        x, _, _, a, _ = self.parts(self.tensors)
        by_kernels = any(t.dtype == x.dtype or x.dtype == torch.bfloat16 for t in a) and x.dtype in HALF_TYPES
        few = any(self.dropout) or all(len(t) <= MOST_RANKS for t in a)
        by_kernels &= few or any(t.dtype == torch.float32 for t in a)  # or in pieces
        with path_taken(x.device.type) if by_kernels or x.is_cpu else nullcontext():
            ours = gradients(self.ours, self.tensors, self.upstream)
        eager = gradients(self.formula, self.tensors, self.upstream)
        bounds = roundings(self.formula, self.tensors, self.upstream, exact)
        for i, found in enumerate(zip(ours, eager, exact, strict=True)):
            assert_no_worse(
                f"result {i}", *found, noise=self.noise * float(found[2].detach().abs().max()), bounds=(bounds, i)
            )


@pairwise(
    dtype=CPU_DTYPES,
    wide=[False, True],
    rows=[1, 17, 160],
    n=[1, 24, 520],
    features=[(32,), (40, 8, 24), (129, 7)],
    ranks=[(), (8,), (16, 16, 16), (5, 64), (1, 2, 3)],
    biased=[False, True],
)
def test_projections(dtype, wide, rows, n, features, ranks, biased, device):
    Case(device, dtype, torch.float32 if wide else dtype, rows, n, features, ranks, biased).check()


@pairwise(dtype=CPU_DTYPES, wide=[False, True], ranks=[(8, 16), (16, 5)], features=[(264, 40), (520,)])
def test_many_rows(dtype, wide, ranks, features, device):
    """On CUDA, one pass over dy computes the gradient of B and that which A's gradient needs."""
    Case(device, dtype, torch.float32 if wide else dtype, 600, 72, features, ranks).check()


@pairwise(
    dtype=CPU_DTYPES,
    wide=[False, True],
    rows=[1, 70],
    n=[24, 37, 136],
    ranks=[(16,), (8, 8, 8), (32, 48, 5)],
    dropout=[(0.25,) * 3, (0.5, 0.0, 0.1), (1.0, 0.3, 0.3)],
)
def test_dropout(dtype, wide, rows, n, ranks, dropout, device):
    """Each adapter has its own mask, for which its seed stands."""
    adapter_dtype = torch.float32 if wide else dtype
    Case(device, dtype, adapter_dtype, rows, n, (40, 24), ranks, dropout=dropout[: len(ranks)]).check()


def test_masks_are_independent_and_have_the_rate():
    rows, columns, rate = 512, 1024, 0.1
    masks = [kept(seed, rate, rows, columns).double() for seed in (0, 1, 2**32, -5, 2**63 - 1)]
    # Five standard deviations of a mean of independent draws.
    bound = 5 * (rate * (1 - rate) / (rows * columns)) ** 0.5
    for i, mask in enumerate(masks):
        assert abs(float(mask.mean()) - (1 - rate)) < bound
        centred = mask - mask.mean()
        shifted = [centred.roll(1, 0), centred.roll(1, 1), centred.roll(64, 1), *(m - m.mean() for m in masks[i + 1 :])]
        for other in shifted:
            assert abs(float((centred * other).mean())) < bound * (rate * (1 - rate)) ** 0.5
        for dim in 0, 1:
            means = mask.mean(dim)
            assert float(means.var()) == pytest.approx(rate * (1 - rate) / mask.shape[dim], rel=0.35)
        # Beyond what independent elements reach, if rows agree that are neither equal nor neighbours.
        largest = float(torch.linalg.matrix_norm(centred, 2)) / (rate * (1 - rate)) ** 0.5
        assert largest < 1.05 * (rows**0.5 + columns**0.5)


def test_dropout_follows_the_generator(device):
    case = Case(device, torch.float32, torch.float32, dropout=(0.5, 0.5))
    x, weights, biases, a, b = case.parts(case.tensors)

    def drawn():
        return torch.stack(lora_projections(x, weights[:1], biases[:1], a[:1], b[:1], [1.0], [0], [0.5]))

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    assert torch.equal(first, drawn()) and not torch.equal(first, second)


@pytest.mark.parametrize("rows, n, features", [(0, 8, (8, 8)), (3, 0, (8, 8)), (3, 8, (0, 8))])
def test_empty(rows, n, features, device):
    case = Case(device, torch.float32, torch.float32, rows, n, features)
    ours, theirs = (gradients(f, case.tensors, case.upstream) for f in (case.ours, case.formula))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["batched", "transposed", "expanded"])
def test_layouts_of_x(layout, device):
    x = {
        "batched": lambda: torch.randn(2, 3, 4, 16, device=device),
        "transposed": lambda: torch.randn(2, 16, 3, device=device).transpose(1, 2),
        "expanded": lambda: torch.randn(1, 16, device=device).expand(5, 16),
    }[layout]()
    case = Case(device, torch.float32, torch.float32, n=16)
    tensors = [x.requires_grad_(), *case.tensors[1:]]
    ys = case.ours(*tensors)
    assert all(y.shape == (*x.shape[:-1], m) for y, m in zip(ys, (32, 8)))
    for a, b in zip(ys, case.formula(*tensors)):
        torch.testing.assert_close(a, b)


def test_only_what_needs_a_gradient_is_computed(device):
    case = Case(device, torch.float32, torch.float32)
    for i in range(len(case.tensors)):
        only = [t.detach().requires_grad_(i == j) for j, t in enumerate(case.tensors)]
        (ours,) = torch.autograd.grad(case.ours(*only), only[i], case.upstream)
        reached = [(y, dy) for y, dy in zip(case.formula(*only), case.upstream) if y.requires_grad]
        ys, dys = zip(*reached)
        (theirs,) = torch.autograd.grad(ys, only[i], dys)
        torch.testing.assert_close(ours, theirs)


def test_an_output_without_gradient(device):
    case = Case(device, torch.float32, torch.float32)
    learned = case.tensors[0], *case.tensors[-4:]

    def found(function):
        return torch.autograd.grad(function(*case.tensors)[0], learned, case.upstream[0], allow_unused=True)

    for ours, theirs in zip(found(case.ours), found(case.formula)):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


@pairwise(
    dtype=CPU_DTYPES,
    op=[("swiglu", (None,)), ("swiglu", (0.5,)), ("geglu", ("tanh",)), ("geglu", ("none",))],
    learned=["all", "adapters", "activations", "b"],
)
def test_gated_projections(dtype, op, learned, device):
    torch.manual_seed(0)
    name, options = op
    shapes = dict(gate=(9, 24), up=(9, 24), weight=(16, 24), bias=(16,), a=(8, 24), b=(16, 8))
    wanted = dict(all=list(shapes), adapters=["a", "b"], activations=["gate", "up"], b=["b"])[learned]
    made = [
        torch.randn(shape, device=device).to(torch.float32 if key in "ab" else dtype).requires_grad_(key in wanted)
        for key, shape in shapes.items()
    ]
    dy = [torch.randn(9, 16, device=device, dtype=dtype)]

    def ours(gate, up, weight, bias, a, b):
        return gated_lora_projection(name, options, gate, up, weight, bias, [a], [b], [0.5])

    def formula(gate, up, weight, bias, a, b):
        product = getattr(F, name).reference(gate, up, *options)
        return F.lora_linear.reference(product, weight, [a], [b], [0.5], bias)

    exact = gradients(formula, [like(t, torch.float64) for t in made], dy)
    bounds = roundings(formula, made, dy, exact)
    found = zip(gradients(ours, made, dy), gradients(formula, made, dy), exact, strict=True)
    for i, each in enumerate(found):
        noise = TRUNCATION * float(each[2].detach().abs().max()) if torch.device(device).type == "cuda" else 0.0
        assert_no_worse(f"result {i}", *each, noise=noise, bounds=(bounds, i))


def test_gradcheck():
    case = Case("cpu", torch.float64, torch.float64, rows=3, n=4, features=(5, 2))
    assert torch.autograd.gradcheck(case.ours, case.tensors)
    x, weights, _, a, b = case.parts(case.tensors)

    def alone(x, weight, a, b):
        return lora_linear(x, weight, [a], [b], [0.5])

    assert torch.autograd.gradcheck(alone, [x, weights[0], a[0], b[0]])


def test_results_do_not_share_memory(device):
    case = Case(device, torch.float32, torch.float32, ranks=(4, 3, 2))
    found = [*case.ours(*case.tensors)]
    found += torch.autograd.grad(found, case.tensors, case.upstream)
    assert len({t.untyped_storage().data_ptr() for t in found}) == len(found)


def test_autocast(device):
    """Like torch's linear layer, everything in half precision."""
    case = Case(device, torch.float32, torch.float32)
    x, weights, biases, a, b = case.parts(case.tensors)
    with torch.autocast(device, torch.bfloat16):
        y = lora_linear(x, weights[0], a[:1], b[:1], [0.5], biases[0])
        expected = (
            functional.linear(x, weights[0], biases[0]) + functional.linear(functional.linear(x, a[0]), b[0]) * 0.5
        )
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-6)
    assert {g.dtype for g in torch.autograd.grad(y.sum(), [x, weights[0], a[0], b[0]])} == {torch.float32}


def arguments() -> dict:
    return dict(
        x=torch.randn(2, 8), weight=torch.randn(5, 8), a=[torch.randn(3, 8)], b=[torch.randn(5, 3)], scale=[1.0],
        bias=torch.randn(5),
    )  # fmt: skip


ERRORS = {
    "x": (dict(x=torch.ones(2, 8, dtype=torch.long)), "x must be float32, float16, bfloat16 or float64"),
    "weight's columns": (dict(weight=torch.ones(5, 7)), r"weight must have shape \[features, 8\]"),
    "weight's dtype": (dict(weight=torch.ones(5, 8).half()), "weight must have the dtype of x, Float"),
    "bias": (dict(bias=torch.ones(4)), r"bias must have shape \[5\], one value per feature"),
    "count of b": (dict(b=[]), "b must have as many entries as a, 1"),
    "count of scale": (dict(scale=[1.0, 2.0]), "scale must have as many entries as a, 1"),
    "a's columns": (dict(a=[torch.ones(3, 7)]), r"a\[0\] must have shape \[rank, 8\], the last dimension of x"),
    "a's dtype": (dict(a=[torch.ones(3, 8).half()]), r"a\[0\] must be float32 or have the dtype of x, Float"),
    "a's dimensions": (dict(a=[torch.ones(8)]), r"a\[0\] must have two dimensions"),
    "b's rank": (
        dict(b=[torch.ones(5, 2)]),
        r"b\[0\] must have shape \[5, 3\], the features of weight and the rank of a",
    ),
    "b's device": (dict(b=[torch.ones(5, 3, device="meta")]), r"b\[0\] must be on cpu like x"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    changed, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=f"lora_linear: {message}.*got "):
        lora_linear(**arguments() | changed)


@pytest.mark.gpu
def test_pieces_hold_all_digits():
    """bf16 activations and fp32 adapters: all but x and dy is fp32."""
    case = Case("cuda", torch.bfloat16, torch.float32, 8192, 4096, (1024, 512, 72), (16, 16, 16))
    exact = gradients(case.formula, [like(t, torch.float64) for t in case.tensors], case.upstream)
    ours = gradients(case.ours, case.tensors, case.upstream)
    of_adapters = list(zip(ours, exact))[-6:]
    assert all(t.dtype == torch.float32 for t, _ in of_adapters)
    for t, truth in of_adapters:
        assert float((t - truth).abs().max() / truth.abs().max()) < TRUNCATION


@pytest.mark.gpu
def test_infinity_is_not_hidden():
    x, weight = (
        torch.ones(1, 8, device="cuda", dtype=torch.bfloat16),
        torch.zeros(8, 8, device="cuda", dtype=torch.bfloat16),
    )
    a, b = torch.zeros(1, 8, device="cuda"), torch.ones(8, 1, device="cuda")
    a[0, 0] = torch.inf
    assert not lora_linear(x, weight, [a], [b], [1.0]).isfinite().any()
