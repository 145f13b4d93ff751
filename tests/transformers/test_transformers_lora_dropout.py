"""Dropout of LoRA layers in patched models: peft's own layers with the same masks compute the same."""

import pytest
import torch
from checks import count_graphs
from language_models import step, tokens
from lora_dropout import dropped
from lora_layers import (
    CALLS,
    LAYERS,
    assert_as_accurate,
    build,
    lora_layers,
    lora_rows,
    record_calls,
    results,
    taken,
)
from patched_models import assert_same_logits, logits_of
from torch import nn

from liger_ops.linear import adapters

pytestmark = pytest.mark.usefixtures("as_large_models")
RATE = 0.25


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


@pytest.fixture
def seeds(monkeypatch):
    """A seed for each layer with dropout: the same in every step."""
    given, function = {}, adapters.seeds_for

    def counted(dropout, device):
        if function(dropout, device) is None:
            return None
        given.setdefault("next", 0)
        first = given["next"] % (7 * LAYERS)
        given["next"] += len(dropout)
        return torch.arange(first, first + len(dropout), device=device) * 12345678901

    monkeypatch.setattr(adapters, "seeds_for", counted)


class Masked(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def forward(self, x):
        return dropped(x, self.seed, RATE) if self.training else x


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "dtype, adapter_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_results_are_as_accurate_as_those_of_peft(dtype, adapter_dtype, order, calls, seeds):
    plain, _ = build("", "llama", dtype, adapter_dtype, lora_dropout=RATE)
    # The layers are called in the order of the model.
    for i, layer in enumerate(lora_layers(plain)):
        layer.lora_dropout["default"] = Masked(i * 12345678901)
    ids = tokens()
    theirs = results(plain.train(), ids)
    model, report = build(order, "llama", dtype, adapter_dtype, lora_dropout=RATE)
    ours = results(model.train(), ids)
    assert taken(calls) == 2 * LAYERS * CALLS
    if order == "after":
        assert lora_rows(report) == {("lora_linear", ""): 7 * LAYERS}
    assert_as_accurate(ours, theirs, plain, ids, dtype)


def test_nothing_is_dropped_in_evaluation(calls):
    model, plain, ids = build("after", lora_dropout=RATE)[0], build("", lora_dropout=RATE)[0], tokens()
    assert_same_logits(logits_of(model.eval(), ids), logits_of(plain.eval(), ids), model, ids)
    assert taken(calls)


def results_of_seed(model, ids):
    torch.manual_seed(5)
    return step(model.train(), ids)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_masks(reentrant):
    model, ids = build("after", lora_dropout=RATE)[0], tokens()
    expected = results_of_seed(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss, gradients = results_of_seed(model, ids)
    torch.testing.assert_close(loss, expected[0], rtol=0, atol=0)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=0)
    assert not torch.equal(step(model, ids)[0], loss)


def test_compiled_models_have_one_graph(calls):
    torch._dynamo.reset()
    model, ids = build("after", lora_dropout=RATE)[0], tokens()
    expected = results_of_seed(model, ids)
    calls.clear()
    backend, graphs = count_graphs()
    loss, _ = results_of_seed(torch.compile(model, backend=backend, fullgraph=True), ids)
    assert len(graphs) == 1 and taken(calls) == LAYERS * CALLS
    torch.testing.assert_close(loss, expected[0])
