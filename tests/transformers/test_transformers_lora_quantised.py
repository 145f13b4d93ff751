"""LoRA layers of peft over bitsandbytes' weights in four bits (QLoRA): the same numbers, without a kept copy of a weight."""

from contextlib import nullcontext

import bitsandbytes
import pytest
import torch
from torch import nn

from liger_ops.linear import peft
from liger_ops.linear.packed import Packed, dequantised
from tests.support.models.language_models import make, step, tokens
from tests.support.models.lora_bases import replace_linears
from tests.support.models.lora_layers import (
    CALLS,
    LAYERS,
    assert_as_accurate,
    lora_rows,
    record_calls,
    results,
    taken,
    with_adapters,
)
from tests.support.models.peft_models import four_bits, in_four_bits

pytestmark = pytest.mark.usefixtures("as_large_models")


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


def with_whole_weights(model):
    def whole(linear):
        made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
        values = dequantised(linear.weight, linear.weight.quant_state, torch.float32)
        made.load_state_dict({"weight": values} | ({} if linear.bias is None else {"bias": linear.bias}))
        return made.requires_grad_(False)

    model.is_loaded_in_4bit = False
    return replace_linears(model, whole)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "name, dtype, autocasts, options",
    [
        ("llama", torch.bfloat16, False, {}),
        ("qwen2", torch.bfloat16, False, {"nested": False}),
        ("llama", torch.float32, True, {"quant_type": "fp4"}),
        ("llama", torch.bfloat16, True, {}),
        ("llama", torch.float32, False, {"compute_dtype": torch.float32}),
        ("llama", torch.float32, False, {"compute_dtype": None}),
    ],
)
def test_results_are_as_accurate_as_those_of_peft(name, dtype, autocasts, options, order, calls):
    ids, found = tokens(), []
    for patched in (order, ""):
        model, _ = four_bits(patched, name, dtype, **options)
        calls.clear()
        with torch.autocast("cpu", torch.bfloat16) if autocasts else nullcontext():
            found.append(results(model, ids))
        # The evaluation is without gradients.
        assert taken(calls) == (LAYERS * CALLS if patched else [])
    for key in found[1]:
        assert found[0][key].dtype == found[1][key].dtype
    exact = with_adapters(with_whole_weights(in_four_bits(make(name, dtype=dtype), **options)))
    assert_as_accurate(*found, exact, ids, torch.bfloat16 if autocasts else dtype)


def layers_of(model):
    return [module for module in model.modules() if peft.has_adapters(module)]


def test_calls_without_gradients_are_left_to_bitsandbytes(calls):
    (plain, _), (model, report) = four_bits(""), four_bits("after")
    assert lora_rows(report) == {("lora_linear", ""): 7 * LAYERS}
    for ours, theirs in zip(layers_of(model), layers_of(plain), strict=True):
        x = torch.randn(3, ours.in_features, dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(ours(x), theirs(x))
    assert not calls


def test_no_whole_weight_is_saved(calls):
    model, ids = four_bits("after")[0], tokens()
    weights = {tuple(m.weight.quant_state.shape) for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    saved = []

    def save(t):
        saved.append((t.dtype, tuple(t.shape)))
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        model(input_ids=ids, labels=ids).loss.backward()
    assert calls and weights
    assert any(dtype == torch.uint8 for dtype, _ in saved)
    assert not [shape for dtype, shape in saved if dtype != torch.uint8 and shape in weights]


@pytest.mark.parametrize("order", ["before", "after"])
def test_disabled_adapters(order, calls):
    (plain, _), (model, _) = four_bits(""), four_bits(order)
    with plain.disable_adapter(), model.disable_adapter():
        model(input_ids=tokens())
        for ours, theirs in zip(layers_of(model), layers_of(plain), strict=True):
            x = torch.randn(3, ours.in_features, dtype=torch.bfloat16)
            assert torch.equal(ours(x), theirs(x))
    assert not calls


def test_the_switch(calls):
    model, report = four_bits("after", switches={"lora": False})
    assert {row.reason for row in report.rows if row.kind == "lora"} == {"lora is switched off"}
    step(model, tokens())
    assert not calls


def other_compute_dtype(base):
    base.compute_dtype = torch.float16


def not_quantised(base):
    base.weight.quant_state = None


def transposed(base):
    base.weight.quant_state.shape = torch.Size(reversed(base.weight.quant_state.shape))


def hooked(base):
    base.register_forward_hook(lambda module, inputs, out: None)


@pytest.mark.parametrize(
    "change, reason",
    [
        (other_compute_dtype, "base computes in torch.float16, its input is torch.bfloat16"),
        (not_quantised, "base is not quantised yet"),
        (transposed, "base has another layout of its weight"),
        (hooked, "base is hooked or wrapped"),
    ],
)
def test_why_the_base_is_called(change, reason):
    layer = four_bits("")[0].base_model.model.model.layers[0].mlp.up_proj
    assert isinstance(peft.adapted(layer, torch.bfloat16).weight, Packed)
    change(layer.base_layer)
    assert peft.adapted(layer, torch.bfloat16).weight.reason == reason
