"""LoRA layers of peft in patched models: why peft's own forward runs, and the report."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from liger_ops.linear import peft, project
from liger_ops.transformers import apply_liger_kernel
from tests.support.models.language_models import step, tokens
from tests.support.models.lora_layers import CALLS, LAYERS, LoraLinear, build, lora_rows, record_calls, taken
from tests.support.models.patched_models import assert_same_step

pytestmark = pytest.mark.usefixtures("as_large_models")


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


# ---- Why peft's own forward runs


class Pair(nn.Module):
    """Two projections of one input."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.q, self.k = nn.Linear(6, 8, dtype=dtype), nn.Linear(6, 4, dtype=dtype)

    def forward(self, x):
        return project.project((self.q, self.k), x)


def hook(*path):
    def add(model):
        model.q.get_submodule(".".join(path)).register_forward_hook(lambda module, given, result: result * 2)

    return add


def attribute(name, value):
    return lambda model: setattr(model.q, name, value)


def other_dtype(model):
    model.q.lora_A.to(torch.bfloat16)
    model.q.lora_B.to(torch.bfloat16)


def scale_of_tensor(model):
    model.q.scaling["default"] = torch.tensor(2.0)


def merged_then_disabled(model):
    model.q.merge()
    model.q.enable_adapters(False)


def own_dropout(model):
    model.q.lora_dropout["default"] = nn.AlphaDropout(0.0)


# reason, options of the adapters, change
REASONS = [
    ("is the variant Dora", {"use_dora": True}, None),
    ("its adapter has a bias", {"lora_bias": True}, None),
    ("its A is hooked or wrapped", {}, hook("lora_A", "default")),
    ("its B is hooked or wrapped", {}, hook("lora_B", "default")),
    ("its dropout is hooked or replaced", {}, hook("lora_dropout", "default")),
    ("its dropout is hooked or replaced", {}, own_dropout),
    ("its A is torch.bfloat16, its B torch.bfloat16, its input torch.float32", {}, other_dtype),
    ("its scale is no number", {}, scale_of_tensor),
    ("is disabled while merged", {}, merged_then_disabled),
]


def adapted_pair(options, change, dtype=torch.float32):
    torch.manual_seed(0)
    model = get_peft_model(
        Pair(dtype), LoraConfig(r=2, target_modules=["q", "k"], **{"init_lora_weights": False, **options})
    )
    if change is not None:
        change(model.base_model.model)
    return model.base_model.model


@pytest.mark.parametrize("reason, options, change", REASONS)
def test_reasons(reason, options, change, calls):
    x = torch.randn(3, 6)
    theirs, ours = adapted_pair(options, change), adapted_pair(options, change)
    assert peft.adapted(ours.q, x.dtype) == reason
    rows = {row.module: row for row in apply_liger_kernel(ours).rows}
    assert (rows["q"].replacement, rows["q"].reason) == ("", reason)
    together, apart = lambda model: model(x), lambda model: (model.q(x), model.k(x))
    for called in (together, apart):
        calls.clear()
        outputs = []
        for model, call in ((theirs, apart), (ours, called)):
            torch.manual_seed(3)
            outputs.append([y.detach() for y in call(model)])
        # The change is one of q alone.
        assert len(calls) == (0 if options else 1)
        for expected, y in zip(*outputs):
            torch.testing.assert_close(y, expected)


def test_inputs_that_are_not_cast(calls):
    model = adapted_pair({}, attribute("cast_input_dtype_enabled", False))
    read = peft.adapted(model.q, torch.float32)
    assert read.weight is model.q.base_layer.weight and read.a[0] is model.q.lora_A["default"].weight
    half = adapted_pair({}, attribute("cast_input_dtype_enabled", False), torch.bfloat16)
    assert peft.adapted(half.q, torch.bfloat16) == "does not cast its input"
    apply_liger_kernel(half)
    with pytest.raises(RuntimeError, match="dtype"):
        half.q(torch.randn(3, 6, dtype=torch.bfloat16))
    assert not calls


def test_inputs_of_another_dtype_than_the_base(calls):
    model = adapted_pair({}, None)
    apply_liger_kernel(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(3, 6, dtype=torch.bfloat16))
    for layer in (model.q, model.q.base_layer):
        read = peft.adapted(layer, torch.bfloat16)
        assert read.weight.reason == "base is torch.float32, its input torch.bfloat16"
    assert not calls


def test_calls_that_no_operator_takes(calls):
    model, plain, x = adapted_pair({}, None), adapted_pair({}, None), torch.randn(3, 6)
    apply_liger_kernel(model)
    for call in (
        lambda model: model(x[0]),
        lambda model: torch.func.vmap(model)(x[None]),
        lambda model: torch.func.jvp(model, (x,), (x,))[1],
        lambda model: [model.eval().q(x, adapter_names=["default", "__base__", "default"])],
    ):
        for ours, theirs in zip(call(model), call(plain), strict=True):
            assert torch.equal(ours, theirs)
        assert not calls
    model(x)
    assert taken(calls) == [2]


def test_hooked_layers_are_called(calls):
    model, x = adapted_pair({}, None), torch.randn(3, 6)
    apply_liger_kernel(model)
    expected = model(x)
    assert taken(calls) == [2]
    model.q.register_forward_hook(lambda module, given, result: -result)
    q, k = model(x)
    assert taken(calls) == [1, 1]
    torch.testing.assert_close((-q, k), expected)
    replaced, calls[:] = model.q.forward, []
    model.q.forward = lambda x: replaced(x) * 2
    q, k = model(x)
    torch.testing.assert_close((-q / 2, k), expected)
    assert taken(calls) == [1, 1]


def test_a_class_with_another_forward(monkeypatch, calls):
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: torch.zeros(len(x), self.out_features))
    model = adapted_pair({}, None)
    rows = apply_liger_kernel(model).rows
    assert {row.reason for row in rows if row.kind == "lora"} == {"its forward is not peft's"}
    assert not any(y.any() for y in model(torch.randn(3, 6))) and not calls


# ---- The report and the switch


def test_other_layers_of_peft_are_reported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.conv, self.linear = nn.Embedding(5, 4), nn.Conv2d(2, 2, 1), nn.Linear(4, 4)

    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=["embedding", "conv", "linear"]))
    rows = {row.module: (row.replacement, row.reason) for row in apply_liger_kernel(model).rows if row.kind == "lora"}
    assert rows == {
        "embedding": ("", "base is Embedding"),
        "conv": ("", "base is Conv2d"),
        "linear": ("lora_linear", ""),
    }


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_switch(order, calls):
    ids, expected = tokens(), step(build("")[0], tokens())
    model, report = build(order, switches={"lora": False})
    assert {row.kind for row in report.replaced} >= {"rope", "mlp", "norm", "loss"}
    assert lora_rows(report) == ({("", "lora is switched off"): 7 * LAYERS} if order == "after" else {})
    assert_same_step(model, ids, expected)
    assert not calls
    # One model's switch is not another's.
    step(build(order)[0], ids)
    assert taken(calls) == LAYERS * CALLS
