"""lora_linear against its formula in fp64, and the projections of one input that liger_ops.linear.adapters computes with it:
of the input, or added to the results of other layers."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from liger_ops import functional as F
from liger_ops.linear.adapters import gated_lora_projection, lora_projections, seeds_for
from tests.support.checks import (
    CPU_DTYPES,
    HALF_TYPES,
    OPCHECKS,
    assert_no_worse,
    gradients,
    like,
    path_taken,
    roundings,
)
from tests.support.models.lora_dropout import dropped, kept
from tests.support.pairs import pairwise

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
    """Projections of one input with adapters in any dtypes. Each is of a kind: "multiplied" has a weight, "biased" a bias
    too, "called" the result of another layer, "alone" neither."""

    def __init__(
        self, device="cpu", dtype=torch.float32, adapter_dtype=None, rows=(17,), n=24, features=(32, 8), ranks=(4, 3),
        kinds=("biased", "multiplied"), of=None, dropout=(),
    ) -> None:  # fmt: skip
        torch.manual_seed(0)

        def make(*shape, dtype=dtype, scale=1.0):
            return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()

        self.of = [i % len(features) for i in range(len(ranks))] if of is None else of
        self.scale, self.kinds, self.dropout = [2.0, 0.5, 1.5, -1.0][: len(ranks)], kinds, dropout
        self.tensors = [make(*rows, n)]
        for kind, m in zip(kinds, features, strict=True):
            self.tensors += [make(m, n, scale=max(n, 1) ** -0.5)] if kind in ("multiplied", "biased") else []
            self.tensors += [make(m)] if kind == "biased" else [make(*rows, m)] if kind == "called" else []
        of_adapters = dict(dtype=adapter_dtype or dtype)
        self.tensors += [make(r, n, scale=max(n, 1) ** -0.5, **of_adapters) for r in ranks]
        self.tensors += [make(features[i], r, scale=r**-0.5, **of_adapters) for i, r in zip(self.of, ranks)]
        self.upstream = [torch.randn(*rows, m, device=device, dtype=dtype) for m in features]
        by_blocks = any(dropout) or max(ranks, default=0) <= MOST_RANKS
        self.noise = TRUNCATION if by_blocks else truncation(*rows, n, *features)

    def parts(self, tensors):
        rest, weights, biases = iter(tensors), [], []
        x = next(rest)
        for kind in self.kinds:
            weights.append(next(rest) if kind in ("multiplied", "biased") else None)
            biases.append(next(rest) if kind in ("biased", "called") else None)
        a = [next(rest) for _ in self.of]
        return x, weights, biases, a, list(rest)

    def ours(self, *tensors):
        torch.manual_seed(7)
        return lora_projections(*self.parts(tensors), self.scale, self.of, self.dropout)

    def formula(self, *tensors):
        """As peft computes it."""
        x, weights, ys, a, b = self.parts(tensors)
        ys = [y if w is None else functional.linear(x, w, y) for w, y in zip(weights, ys)]
        torch.manual_seed(7)
        seeds = seeds_for(self.dropout, x.device)
        for j, i in enumerate(self.of):
            given = x.to(a[j].dtype)
            given = given if seeds is None else dropped(given, int(seeds[j]), self.dropout[j])
            added = functional.linear(functional.linear(given, a[j]), b[j]) * self.scale[j]
            ys[i] = added if ys[i] is None else ys[i] + added
        return tuple(y.to(x.dtype) for y in ys)

    def check(self, noise=None):
        exact = gradients(self.formula, [like(t, torch.float64) for t in self.tensors], self.upstream)
        x, weights, _, a, _ = self.parts(self.tensors)
        by_kernels = any(t.dtype == x.dtype or x.dtype == torch.bfloat16 for t in a) and x.dtype in HALF_TYPES
        few = any(self.dropout) or all(len(t) <= MOST_RANKS for t in a)
        by_kernels &= few or any(t.dtype == torch.float32 for t in a)  # or in pieces
        by_kernels &= all(weight is not None for weight in weights)
        with path_taken(x.device.type) if by_kernels or x.is_cpu else nullcontext():
            ours = gradients(self.ours, self.tensors, self.upstream)
        eager = gradients(self.formula, self.tensors, self.upstream)
        bounds = roundings(self.formula, self.tensors, self.upstream, exact)
        noise = 0.0 if x.is_cpu else noise or self.noise
        for i, found in enumerate(zip(ours, eager, exact, strict=True)):
            largest = float(found[2].detach().abs().max()) if noise else 0.0
            assert_no_worse(f"result {i}", *found, noise=noise * largest, bounds=(bounds, i))


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
    kinds = ["biased" if biased else "multiplied", *["multiplied"] * (len(features) - 1)]
    Case(device, dtype, torch.float32 if wide else dtype, (rows,), n, features, ranks, kinds).check()


@pairwise(dtype=CPU_DTYPES, wide=[False, True], ranks=[(8, 16), (16, 5)], features=[(264, 40), (520,)])
def test_many_rows(dtype, wide, ranks, features, device):
    """On CUDA, one pass over dy computes the gradient of B and that which A's gradient needs."""
    kinds = ["biased", "multiplied"][: len(features)]
    Case(device, dtype, torch.float32 if wide else dtype, (600,), 72, features, ranks, kinds).check()


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
    Case(device, dtype, adapter_dtype, (rows,), n, (40, 24), ranks, dropout=dropout[: len(ranks)]).check()


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
    case = Case(device, dropout=(0.5, 0.5))
    x, weights, biases, a, b = case.parts(case.tensors)

    def drawn():
        return torch.stack(lora_projections(x, weights[:1], biases[:1], a[:1], b[:1], [1.0], [0], [0.5]))

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    assert torch.equal(first, drawn()) and not torch.equal(first, second)


@pytest.mark.parametrize("rows, n, features", [(0, 8, (8, 8)), (3, 0, (8, 8)), (3, 8, (0, 8))])
def test_empty(rows, n, features, device):
    case = Case(device, rows=(rows,), n=n, features=features)
    ours, theirs = (gradients(f, case.tensors, case.upstream) for f in (case.ours, case.formula))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kinds", [("biased", "multiplied"), ("called", "called"), ("alone", "biased")])
def test_only_what_needs_a_gradient_is_computed(kinds, device):
    case = Case(device, kinds=kinds)
    for i in range(len(case.tensors)):
        only = [t.detach().requires_grad_(i == j) for j, t in enumerate(case.tensors)]
        (ours,) = torch.autograd.grad(case.ours(*only), only[i], case.upstream)
        reached = [(y, dy) for y, dy in zip(case.formula(*only), case.upstream) if y.requires_grad]
        ys, dys = zip(*reached)
        (theirs,) = torch.autograd.grad(ys, only[i], dys)
        torch.testing.assert_close(ours, theirs)


def test_an_output_without_gradient(device):
    case = Case(device)
    learned = case.tensors[0], *case.tensors[-4:]

    def found(function):
        return torch.autograd.grad(function(*case.tensors)[0], learned, case.upstream[0], allow_unused=True)

    for ours, theirs in zip(found(case.ours), found(case.formula)):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


@pairwise(
    dtype=CPU_DTYPES,
    op=[("swiglu", (None,)), ("swiglu", (0.5,)), ("geglu", ("tanh",)), ("geglu", ("none",))],
    learned=["all", "adapters", "activations", "b"],
    called=[False, True],
)
def test_gated_projections(dtype, op, learned, called, device):
    """called: added to the result of another layer."""
    torch.manual_seed(0)
    name, options = op
    shapes = dict(gate=(9, 24), up=(9, 24), a=(8, 24), b=(16, 8))
    shapes |= dict(bias=(9, 16)) if called else dict(bias=(16,), weight=(16, 24))
    wanted = dict(all=list(shapes), adapters=["a", "b"], activations=["gate", "up"], b=["b"])[learned]
    made = [
        torch.randn(shape, device=device).to(torch.float32 if key in "ab" else dtype).requires_grad_(key in wanted)
        for key, shape in shapes.items()
    ]
    dy = [torch.randn(9, 16, device=device, dtype=dtype)]

    def ours(gate, up, a, b, bias, weight=None):
        return gated_lora_projection(name, options, gate, up, weight, bias, [a], [b], [0.5])

    def formula(gate, up, a, b, bias, weight=None):
        product = getattr(F, name).reference(gate, up, *options)
        if called:
            return (bias + 0.5 * functional.linear(functional.linear(product.to(a.dtype), a), b)).to(dy[0].dtype)
        return F.lora_linear.reference(product, weight, [a], [b], [0.5], bias)

    exact = gradients(formula, [like(t, torch.float64) for t in made], dy)
    bounds = roundings(formula, made, dy, exact)
    found = zip(gradients(ours, made, dy), gradients(formula, made, dy), exact, strict=True)
    for i, each in enumerate(found):
        noise = TRUNCATION * float(each[2].detach().abs().max()) if torch.device(device).type == "cuda" else 0.0
        assert_no_worse(f"result {i}", *each, noise=noise, bounds=(bounds, i))


def test_results_do_not_share_memory(device):
    case = Case(device, ranks=(4, 3, 2))
    found = [*case.ours(*case.tensors)]
    found += torch.autograd.grad(found, case.tensors, case.upstream)
    assert len({t.untyped_storage().data_ptr() for t in found}) == len(found)


# ---- Added to the results of other layers


def beside_others(kinds, dtype=torch.float32, adapter_dtype=None, rows=(2, 7), of=(0, 1, 2, 1), rank=3, device="cpu"):
    of = [i for i in of if i < len(kinds)]
    return Case(device, dtype, adapter_dtype, rows, 16, (12, 8, 5)[: len(kinds)], [rank] * len(of), kinds, of)


@pairwise(
    kinds=[("called",), ("biased", "called", "alone"), ("called", "called", "called"), ("alone", "biased")],
    dtype=CPU_DTYPES,
    wide=[False, True],
    rows=[(7,), (2, 7), (1,)],
    rank=[1, 9],
)
def test_results_and_gradients(kinds, dtype, wide, rows, rank, device):
    beside_others(kinds, dtype, torch.float32 if wide else dtype, rows, rank=rank, device=device).check(noise=2**-20)


def test_the_gradient_of_a_result_is_that_of_the_sum():
    case = beside_others(("biased", "called"))
    result = case.parts(case.tensors)[2][1]
    (gradient,) = torch.autograd.grad(case.ours(*case.tensors), result, case.upstream)
    assert torch.equal(gradient, case.upstream[1])


@pytest.mark.parametrize("of", [(), (0,)])
def test_results_without_adapters(of):
    case = beside_others(("biased", "called"), of=of)
    x, _, (_, result), *_ = case.parts(case.tensors)
    ys = case.ours(*case.tensors)
    assert torch.equal(ys[1], result) and ys[1].data_ptr() != result.data_ptr()
    alone = beside_others(("called",), of=())
    (dx,) = torch.autograd.grad(alone.ours(*alone.tensors), alone.tensors[0], alone.upstream)
    assert dx.shape == x.shape and not dx.any()


def test_layouts_of_results():
    case = beside_others(("called",), rows=(4, 6))
    x, result, *adapters = case.tensors
    for changed in (
        result.detach().transpose(0, 1).contiguous().transpose(0, 1),
        result.detach().mT.contiguous().mT,
        result.detach()[:1].expand(4, 6, -1),
    ):
        torch.testing.assert_close(*(of(x, changed, *adapters) for of in (case.ours, case.formula)))


def test_opcheck():
    """The sample that test_every_operator.py checks has a weight in each projection."""
    case = beside_others(("biased", "called", "alone"))
    arguments = (*case.parts([t.detach() for t in case.tensors]), case.scale, case.of)
    torch.library.opcheck(torch.ops.liger._lora_projections.default, arguments, test_utils=OPCHECKS)
    t = torch.ops.liger._lora_projections(*arguments)[-1]
    x, weights, _, a, b, scale, of = arguments
    backward = (case.upstream, x, weights, a, b, t, 31, scale, of)
    torch.library.opcheck(torch.ops.liger._lora_projections_bwd.default, backward, test_utils=OPCHECKS)


# ---- Wrong arguments that test_wrong_calls.py does not make

ERRORS = {
    "a's dtype": (dict(a=[torch.ones(3, 8).half()]), r"a\[0\] must be float32 or have the dtype of x, Float"),
    "b's rank": (
        dict(b=[torch.ones(5, 2)]),
        r"b\[0\] must have shape \[5, 3\], the features of weight and the rank of a",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    changed, message = ERRORS[case]
    given = dict(
        x=torch.randn(2, 8), weight=torch.randn(5, 8), a=[torch.randn(3, 8)], b=[torch.randn(5, 3)], scale=[1.0]
    )
    with pytest.raises(RuntimeError, match=f"lora_linear: {message}.*got "):
        lora_linear(**given | changed)


def given_beside_others(**changed):
    case = beside_others(("called",), of=(0,))
    x, weights, biases, a, b = case.parts([t.detach() for t in case.tensors])
    return dict(x=x, weights=weights, biases=biases, a=a, b=b, scale=[1.0], of=[0]) | changed


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(biases=[torch.ones(2, 7, 12).half()]), "bias must have the dtype of x, Float"),
        (
            dict(biases=[torch.ones(7, 12)]),
            r"bias must have the shape of x, \[2, 7, 16\], except for the last dimension",
        ),
        (dict(biases=[torch.ones(7, 2, 12)]), r"bias must have the shape of x, \[2, 7, 16\]"),
        (dict(biases=[torch.ones(2, 7, 12, device="meta")]), "bias must be on cpu like x"),
        (dict(biases=[torch.ones(2, 7, 9)]), r"b\[0\] must have shape \[9, 3\]"),
        (dict(biases=[None], a=[], b=[], scale=[], of=[]), "bias must be another layer's result"),
    ],
)
def test_errors_of_projections(changed, message):
    with pytest.raises(RuntimeError, match=f"lora_linear: {message}.*got "):
        torch.ops.liger._lora_projections(**given_beside_others(**changed))


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(grads=[]), "grads must have 1 entries"),
        (dict(b=[]), "b must have as many entries as a, 1"),
        (dict(scale=[]), "scale must have as many entries as a, 1"),
        (dict(of=[2**31]), r"of must lie in \[0, 1\), the weights"),
        (dict(dropout=[0.5]), "seeds must be given with dropout"),
    ],
)
def test_errors_of_backward(changed, message):
    call = given_beside_others(biases=[None])
    y, t = torch.ops.liger._lora_projections(**call)
    del call["biases"]
    call |= dict(grads=[y], t=t, wanted=1) | changed
    with pytest.raises(RuntimeError, match=f"lora_linear backward: {message}.*got "):
        torch.ops.liger._lora_projections_bwd(**call)


@pytest.mark.gpu
def test_pieces_hold_all_digits():
    """bf16 activations and fp32 adapters: all but x and dy is fp32."""
    case = Case(
        "cuda",
        torch.bfloat16,
        torch.float32,
        (8192,),
        4096,
        (1024, 512, 72),
        (16, 16, 16),
        ["biased", "multiplied", "multiplied"],
    )
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
