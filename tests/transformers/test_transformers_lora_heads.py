"""Adapters of a model's head: the fused loss computes them, and the rest is left to peft."""

import pytest
import torch

from liger_ops.transformers import apply_liger_kernel, unpatch
from tests.support.models.language_models import make, nodes, step, tokens
from tests.support.models.lora_layers import build, with_adapters
from tests.support.models.patched_models import FUSED, assert_same_logits, assert_same_step, through_pickle
from tests.support.models.peft_models import HEAD, record

pytestmark = pytest.mark.usefixtures("as_large_models")
ORDERS = pytest.mark.parametrize("order", ["before", "after"])


@pytest.fixture
def taken(monkeypatch):
    return record(monkeypatch, "head")


def adapt(order, *args, target_modules=HEAD, **options):
    return build(order, *args, target_modules=target_modules, **options)


def head_of(model):
    return model.get_output_embeddings()


def test_a_trained_bias_and_a_trained_base(taken):
    ids, found = tokens(), []
    for patched in (False, True):
        model = make("phi")  # whose head has a bias
        model = with_adapters(model, target_modules=HEAD)
        base = head_of(model).base_layer
        assert base.bias is not None
        base.requires_grad_(True)
        if patched:
            apply_liger_kernel(model)
        found.append((model, step(model, ids)))
    (_, expected), (model, _) = found
    assert taken() == [4] and len(expected[1]) == 4
    assert_same_step(model, ids, expected)


@ORDERS
def test_hooked_heads_compute_logits(order, taken):
    ids, found = tokens(), []
    for model, _ in (adapt(""), adapt(order)):
        head_of(model).register_forward_hook(lambda module, given, result: 2 * result)
        found.append((model, step(model, ids)))
    (_, expected), (model, _) = found
    assert not taken()
    assert_same_step(model, ids, expected)


def test_logits_beside_the_loss(taken):
    (plain, _), (model, _), ids = adapt(""), adapt("after"), tokens()
    expected = plain(input_ids=ids, labels=ids)
    assert model(input_ids=ids, labels=ids).logits is None and taken() == [4]
    found = model(input_ids=ids, labels=ids, skip_logits=False)
    assert not taken()
    torch.testing.assert_close(found.loss, expected.loss)
    assert_same_logits(found.logits.detach(), expected.logits.detach(), plain, ids)


def row_of(report, module):
    return next((row.replacement, row.reason) for row in report.rows if row.module == module)


REASONS = [
    ({"use_dora": True}, {}, "is the variant Dora"),
    ({"lora_bias": True}, {}, "its adapter has a bias"),
    ({}, {"lora": False}, "lora is switched off"),
]


@pytest.mark.parametrize("options, switches, reason", REASONS)
def test_reasons(options, switches, reason, taken):
    ids, expected = tokens(), step(adapt("", **options)[0], tokens())
    model, report = adapt("after", switches=switches, **options)
    assert row_of(report, "lm_head") == ("", reason)
    assert row_of(report, "") == ("", f"its head is left to peft: {reason}")
    assert_same_step(model, ids, expected)
    assert not taken()


SAVED = {"modules_to_save": {"modules_to_save": HEAD}, "tokens": {"trainable_token_indices": {"lm_head": [3, 5, 9]}}}


@ORDERS
@pytest.mark.parametrize("options", SAVED.values(), ids=SAVED)
def test_a_trained_copy_of_the_head(options, order, taken):
    """modules_to_save, and trainable tokens."""
    ids, options = tokens(), {"target_modules": ["q_proj"], **options}
    expected = step(build("", **options)[0], ids)
    assert any("lm_head" in name for name in expected[1])
    model, report = build(order, **options)
    assert row_of(report, "") == (FUSED, "")
    if order == "after":
        assert apply_liger_kernel(model).rows == report.rows
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(model, ids, expected)
    with model.disable_adapter():
        disabled = step_of_base(model, ids)
    twin = through_pickle(model)
    assert FUSED in nodes(twin(input_ids=ids, labels=ids).loss)
    unpatch(model)
    assert_same_step(model, ids, expected)
    with model.disable_adapter():
        torch.testing.assert_close(step_of_base(model, ids), disabled)


def step_of_base(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss


def test_a_saved_copy_is_no_linear_layer_in_fp8():
    options = {"target_modules": ["q_proj"], "modules_to_save": HEAD}
    model, report = build("after", switches={"fp8": "rows"}, **options)
    assert not [row for row in report.rows if row.kind == "linear" and "lm_head" in row.module]


def test_the_inner_model_of_peft():
    model, _ = build("", target_modules=["q_proj"])
    report = apply_liger_kernel(model.base_model)
    assert report.rows[-1].replacement == FUSED and report.model_type == "llama"
    assert apply_liger_kernel(model).rows == report.rows and unpatch(model.base_model)
