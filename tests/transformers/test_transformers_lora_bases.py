"""LoRA layers of peft over bases whose own forward computes the projection: the same numbers, and the same operations of
peft."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from liger_ops.linear import peft, project
from liger_ops.transformers import apply_liger_kernel
from tests.support.checks import assert_no_worse, gradients, roundings
from tests.support.models.lora_bases import BASES, OVER_CODES, Codes, adapt, with_bases
from tests.support.models.lora_layers import lora_rows, record_calls, taken
from tests.support.pairs import pairwise

pytestmark = pytest.mark.usefixtures("as_large_models")


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


class Two(nn.Module):
    """Two projections of one input."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 24), nn.Linear(16, 8)

    def forward(self, x):
        return project.project((self.q, self.k), x)


def two(kind, dtype=torch.float32, adapter_dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = with_bases(Two().to(dtype), kind)
    return adapt(model, kind, ["q", "k"], adapter_dtype, **options).base_model.model


def learned(layers):
    return [weight for layer in layers for weight in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)]


def results_of(model, call, x, upstream):
    """Projections, and the gradients of x and the adapters."""
    ys = call(model)
    found = torch.autograd.grad(ys, [x, *learned((model.q, model.k))], [dy.to(y.dtype) for dy, y in zip(upstream, ys)])
    return [*ys, *found]


def check_layers(model, plain, x, precision, autocasts):
    """The base's own result and gradient, as they are, plus the adapters' part."""
    layers, upstream = (plain.q, plain.k), [torch.randn(3, 5, m) for m in (24, 8)]

    def cast():
        return torch.autocast("cpu", torch.bfloat16) if autocasts else contextlib.nullcontext()

    with cast():
        bases = [layer.base_layer(x) for layer in layers]
    of_bases = [torch.autograd.grad(y, x, dy.to(y.dtype))[0] for y, dy in zip(bases, upstream)]

    def formula(x, *rest):
        given, dx, weights = rest[:2], rest[2], rest[3:]
        # A term whose gradient is that of the bases.
        ys = [y + layer.scaling["default"] * functional.linear(functional.linear(x, a), b)
              for y, layer, a, b in zip(given, layers, weights[::2], weights[1::2])]  # fmt: skip
        return *ys, (x * dx).sum()

    leaves = [x, *bases, sum(t.double() for t in of_bases), *learned(layers)]
    wanted = [x, *learned(layers)]
    inputs = [t.detach().double().requires_grad_(any(t is w for w in wanted)) for t in leaves]
    grads_out = [*(dy.double() for dy in upstream), torch.ones((), dtype=torch.float64)]
    exact = gradients(formula, inputs, grads_out)
    bounds = roundings(formula, inputs, grads_out, exact, precision)
    with cast():
        theirs = results_of(plain, lambda model: (model.q(x), model.k(x)), x, upstream)
        ours = results_of(model, lambda model: model(x), x, upstream)
    places = [0, 1, *range(3, len(exact))]
    for i, mine, other in zip(places, ours, theirs, strict=True):
        assert_no_worse(f"result {i}", mine, other, exact[i], bounds=(bounds, i))


@pairwise(
    kind=[*BASES],
    dtypes=[(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float16,) * 2],
    autocasts=[False, True],
)
def test_layers_are_as_accurate_as_those_of_peft(kind, dtypes, autocasts):
    torch.manual_seed(2)
    x = torch.randn(3, 5, 16).to(dtypes[0]).requires_grad_()
    plain, model = two(kind, *dtypes), two(kind, *dtypes)
    apply_liger_kernel(model)
    with pytest.MonkeyPatch.context() as patch:
        calls = record_calls(patch)
        check_layers(model, plain, x, torch.bfloat16 if autocasts else dtypes[0], autocasts)
    assert calls and sum(call.adapters for call in calls) == 2


@pytest.mark.parametrize("kind", OVER_CODES)
@pytest.mark.parametrize(
    "computes, returns, dtype, autocasts",
    [
        (torch.bfloat16, torch.bfloat16, torch.float32, False),
        (torch.bfloat16, torch.float32, torch.bfloat16, False),
        (torch.float16, torch.float16, torch.bfloat16, False),
        (torch.float32, torch.float32, torch.float32, True),
        (torch.float16, torch.float16, torch.float32, True),
    ],
)
def test_results_of_another_dtype_than_the_input(kind, computes, returns, dtype, autocasts, calls):
    x = torch.randn(3, 5, 16).to(dtype).requires_grad_()
    found = []
    for _ in range(2):
        model = two(kind, dtype)
        for module in model.modules():
            if isinstance(module, Codes):
                module.computes, module.returns = computes, returns
        found.append(model)
    plain, model = found
    apply_liger_kernel(model)
    check_layers(model, plain, x, torch.bfloat16 if autocasts else torch.float32, autocasts)
    assert calls


@pytest.mark.parametrize("kind", OVER_CODES)
def test_dtypes_under_the_autocast_of_gpus(kind, monkeypatch):
    """peft asks whether that is on, not which device computes."""
    model, plain = two(kind), two(kind)
    apply_liger_kernel(model)
    x = torch.randn(3, 16)
    for each in (model, plain):
        for module in each.modules():
            if isinstance(module, Codes):
                module.returns = torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert model.q(x).dtype == plain.q(x).dtype == torch.float16
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
        assert model.q(x).dtype == plain.q(x).dtype


def test_every_lora_layer_over_codes_is_in_the_table():
    known = {name for _, name in peft.PEFT_LINEARS}
    assert {cls.__name__ for cls in OVER_CODES.values()} | {"Linear4bit", "Linear8bitLt"} == known


@pytest.mark.parametrize("kind", BASES)
def test_the_report_says_why_a_base_is_called(kind):
    model = two(kind, torch.bfloat16 if kind == "nf4" else torch.float32)
    read = peft.adapted(model.q, torch.bfloat16 if kind == "nf4" else torch.float32)
    assert read.weight.reason == BASES[kind][1]
    # The report of a four-bit base supposes an input of its own dtype.
    expected = "" if kind == "nf4" else f"calls its base, because {BASES[kind][1]}"
    assert lora_rows(apply_liger_kernel(model)) == {("lora_linear", expected): 2}


def test_hooks_of_bases_see_the_input_and_change_the_result():
    model = two("linear")
    apply_liger_kernel(model)
    seen, x = [], torch.randn(3, 16)
    before = model(x)[0]
    handles = [
        model.q.base_layer.register_forward_pre_hook(lambda module, given: seen.append(given[0])),
        model.q.base_layer.register_forward_hook(lambda module, given, y: y + 1),
    ]
    torch.testing.assert_close(model(x)[0], before + 1)
    assert len(seen) == 1 and seen[0] is x
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(model(x)[0], before)


def test_results_of_another_shape(calls):
    """A base that drops the last row: peft adds what it can broadcast."""
    model, plain = two("linear"), two("linear")
    apply_liger_kernel(model)
    for each in (model, plain):
        each.q.base_layer.register_forward_hook(lambda module, given, y: y.sum(0, keepdim=True))
    x = torch.randn(3, 16)
    torch.testing.assert_close(model(x), (plain.q(x), plain.k(x)))
    assert calls


def test_layers_of_several_kinds_are_one_call(calls):
    torch.manual_seed(0)
    plain = two("linear")
    plain.q.base_layer = nn.Linear(16, 24)
    model = copy.deepcopy(plain)
    apply_liger_kernel(model)
    x = torch.randn(3, 16)
    torch.testing.assert_close(model(x), (plain.q(x), plain.k(x)))
    assert taken(calls) == [2]
    # Another layer without adapters is only called.
    plain.k = model.k = nn.Sequential(nn.Linear(16, 8))
    torch.testing.assert_close(model(x), (plain.q(x), plain.k(x)))
    assert taken(calls) == [1]


@pytest.mark.parametrize("kind", ["gptq", "awq", "int8"])
def test_an_adapted_layer_without_gradients_runs_fused(kind, calls):
    model, plain, x = two(kind), two(kind), torch.randn(1, 1, 16)
    apply_liger_kernel(model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), (plain.eval().q(x), plain.k(x)))
    assert taken(calls) == [2]
