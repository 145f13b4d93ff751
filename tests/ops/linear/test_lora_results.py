"""Adapters that are added to the results of other layers, by the operator behind liger_ops.adapters.lora_projections."""

import pytest
import torch
from checks import CPU_DTYPES, OPCHECKS, assert_no_worse, gradients, like, roundings
from pairs import pairwise
from torch.nn import functional

from liger_ops.linear.adapters import lora_projections

FEATURES = (12, 8, 5)


class Group:
    """Projections of one input with adapters, each of a kind: "multiplied" has a weight, "called" the result of another
    layer, "alone" neither."""

    def __init__(
        self, kinds, dtype=torch.float32, adapter_dtype=None, rows=(2, 7), n=16, of=(0, 1, 2, 1), rank=3, device="cpu"
    ):
        torch.manual_seed(0)

        def make(*shape, dtype=dtype):
            return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()

        self.kinds, self.of = kinds, [i for i in of if i < len(kinds)]
        self.scale = [0.5, 2.0, 1.5, -1.0][: len(self.of)]
        first = {
            "multiplied": lambda m: [make(m, n), make(m)],
            "called": lambda m: [make(*rows, m)],
            "alone": lambda m: [],
        }
        self.tensors = [make(*rows, n)]
        for kind, m in zip(kinds, FEATURES):
            self.tensors += first[kind](m)
        self.tensors += [make(rank, n, dtype=adapter_dtype or dtype) for _ in self.of]
        self.tensors += [make(FEATURES[i], rank, dtype=adapter_dtype or dtype) for i in self.of]
        self.upstream = [torch.randn(*rows, m, dtype=torch.float64).to(device, dtype) for _, m in zip(kinds, FEATURES)]

    def parts(self, tensors):
        rest = iter(tensors)
        x, weights, biases = next(rest), [], []
        for kind in self.kinds:
            weights.append(next(rest) if kind == "multiplied" else None)
            biases.append(None if kind == "alone" else next(rest))
        a = [next(rest) for _ in self.of]
        return x, weights, biases, a, list(rest)

    def ours(self, *tensors):
        return lora_projections(*self.parts(tensors), self.scale, self.of)

    def formula(self, *tensors):
        x, weights, biases, a, b = self.parts(tensors)
        wide = a[0].dtype if a else x.dtype
        ys = []
        for i, (weight, result) in enumerate(zip(weights, biases)):
            y = functional.linear(x, weight, result) if weight is not None else 0.0 if result is None else result
            for j, scale in enumerate(self.scale):
                if self.of[j] == i:
                    y = y + scale * functional.linear(functional.linear(x.to(wide), a[j]), b[j])
            ys.append(y.to(x.dtype))
        return tuple(ys)


@pairwise(
    kinds=[("called",), ("multiplied", "called", "alone"), ("called", "called", "called"), ("alone", "multiplied")],
    dtype=CPU_DTYPES,
    wide=[False, True],
    rows=[(7,), (2, 7), (1,)],
    rank=[1, 9],
)
def test_results_and_gradients(kinds, dtype, wide, rows, rank, device):
    group = Group(kinds, dtype, torch.float32 if wide else dtype, rows, rank=rank, device=device)
    exact = gradients(group.formula, [like(t, torch.float64) for t in group.tensors], group.upstream)
    ours, eager = (gradients(f, group.tensors, group.upstream) for f in (group.ours, group.formula))
    bounds = roundings(group.formula, group.tensors, group.upstream, exact)
    for i, found in enumerate(zip(ours, eager, exact, strict=True)):
        # As in test_lora_linear.py.
        noise = 2**-20 * float(found[2].detach().abs().max()) if device == "cuda" else 0.0
        assert_no_worse(f"result {i}", *found, noise=noise, bounds=(bounds, i))


def test_the_gradient_of_a_result_is_that_of_the_sum():
    group = Group(("multiplied", "called"))
    result = group.parts(group.tensors)[2][1]
    (gradient,) = torch.autograd.grad(group.ours(*group.tensors), result, group.upstream)
    assert torch.equal(gradient, group.upstream[1])


def test_gradcheck():
    group = Group(("multiplied", "called", "alone"), torch.float64, rows=(3,), n=4)
    assert torch.autograd.gradcheck(group.ours, group.tensors)


@pytest.mark.parametrize("of", [(), (0,)])
def test_results_without_adapters(of):
    group = Group(("multiplied", "called"), of=of)
    x, _, (_, result), *_ = group.parts(group.tensors)
    ys = group.ours(*group.tensors)
    assert torch.equal(ys[1], result) and ys[1].data_ptr() != result.data_ptr()
    alone = Group(("called",), of=())
    (dx,) = torch.autograd.grad(alone.ours(*alone.tensors), alone.tensors[0], alone.upstream)
    assert dx.shape == x.shape and not dx.any()


@pytest.mark.parametrize("learned", ["x", "result", "a", "b"])
def test_only_what_needs_a_gradient_is_computed(learned):
    group = Group(("called", "called"))
    x, _, results, a, b = group.parts(group.tensors)
    wanted = {"x": x, "result": results[1], "a": a[0], "b": b[1]}[learned]
    only = [t.detach().requires_grad_(t is wanted) for t in group.tensors]
    (leaf,) = [t for t in only if t.requires_grad]
    reached = [(y, dy) for y, dy in zip(group.formula(*only), group.upstream) if y.requires_grad]
    ys, dys = zip(*reached)
    (ours,) = torch.autograd.grad(group.ours(*only), leaf, group.upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(ys, leaf, dys)[0])


def test_layouts_of_results():
    group = Group(("called",), rows=(4, 6))
    x, _, (result,), *rest = group.parts(group.tensors)
    for changed in (
        result.detach().transpose(0, 1).contiguous().transpose(0, 1),
        result.detach().mT.contiguous().mT,
        result.detach()[:1].expand(4, 6, -1),
    ):
        y = lora_projections(x, [None], [changed], *rest, group.scale, group.of)[0]
        expected = group.formula(x, changed, *[t for tensors in rest for t in tensors])[0]
        torch.testing.assert_close(y, expected)


def test_opcheck():
    group = Group(("multiplied", "called", "alone"))
    arguments = (*group.parts([t.detach() for t in group.tensors]), group.scale, group.of)
    torch.library.opcheck(torch.ops.liger._lora_projections.default, arguments, test_utils=OPCHECKS)
    t = torch.ops.liger._lora_projections(*arguments)[-1]
    x, weights, _, a, b, scale, of = arguments
    backward = (group.upstream, x, weights, a, b, t, 31, scale, of)
    torch.library.opcheck(torch.ops.liger._lora_projections_bwd.default, backward, test_utils=OPCHECKS)


def given(**changed):
    x, weights, biases, a, b = Group(("called",)).parts([t.detach() for t in Group(("called",)).tensors])
    found = dict(x=x, weights=weights, biases=biases, a=a, b=b, scale=[1.0], of=[0]) | changed
    return [found[name] for name in ("x", "weights", "biases", "a", "b", "scale", "of")]


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
        (dict(of=[]), "of must have as many entries as a, 1"),
        (dict(of=[1]), r"of must lie in \[0, 1\), the weights"),
        (dict(of=[-(2**63)]), r"of must lie in \[0, 1\), the weights"),
    ],
)
def test_errors(changed, message):
    with pytest.raises(RuntimeError, match=f"lora_linear: {message}.*got "):
        torch.ops.liger._lora_projections(*given(**changed))


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
    x, weights, _, a, b, scale, of = given()
    (y, t) = torch.ops.liger._lora_projections(x, weights, [None], a, b, scale, of)
    call = dict(grads=[y], x=x, weights=weights, a=a, b=b, t=t, wanted=1, scale=scale, of=of) | changed
    with pytest.raises(RuntimeError, match=f"lora_linear backward: {message}.*got "):
        torch.ops.liger._lora_projections_bwd(**call)
