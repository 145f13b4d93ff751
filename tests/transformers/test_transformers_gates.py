"""Patched attention: its output gate becomes sigmoid_gate, and nothing else changes."""

import pytest
import torch
from checks import path_taken
from language_models import SIZES, known, make, step, tokens
from patched_models import assert_same_step, through_pickle
from rewriting import after, function
from torch import nn

from liger_ops.transformers import apply_liger_kernel, rewrite, unpatch

SIGMOIDS = frozenset({"torch.sigmoid", "F.sigmoid"})
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA = {**HEADS, "layer_types": ["linear_attention", "full_attention"]}
MODELS = {"qwen3_next": DELTA, "qwen3_5_text": DELTA, "afmoe": {}}
REWRITTEN = {
    "y = y * torch.sigmoid(gate)": "y = liger_gate(y, gate)",
    "y = F.sigmoid(self.g(x)) * y": "y = liger_gate(y, self.g(x))",
    "y = y * torch.sigmoid(self.g(x)).unsqueeze(-1)": "y = liger_gate(y, self.g(x).unsqueeze(-1))",
    "if self.gated:\n    y = y * torch.sigmoid(gate)": "if self.gated:\n    y = liger_gate(y, gate)",
    "return self.o(y * torch.sigmoid(gate), torch.sigmoid(z) * y)": "return self.o(liger_gate(y, gate), liger_gate(y, z))",
}
KEPT = [
    "y *= torch.sigmoid(gate)",
    "y = self.f(x) * torch.sigmoid(gate)",  # the order of calls would change
    "y = y * torch.sigmoid((y := x))",
    "y = y * sigmoid(gate)",
    "y = y * torch.sigmoid(gate, out=x)",
    "y = y * torch.sigmoid(gate).unsqueeze(0)",
    "y = y * torch.tanh(gate)",
    "y = y + torch.sigmoid(gate)",
]


@pytest.mark.parametrize("body", REWRITTEN)
def test_products_with_sigmoids_are_merged(body):
    assert after(rewrite.fuse_gates, body, SIGMOIDS) == REWRITTEN[body]


@pytest.mark.parametrize("body", KEPT)
def test_other_statements_stay(body):
    assert after(rewrite.fuse_gates, body, SIGMOIDS) is None


def test_a_name_is_torchs_function_only_where_it_is():
    found, _ = function("return x")
    assert rewrite.sigmoids_in(found) == {"torch.sigmoid", "torch.nn.functional.sigmoid"}
    found.__globals__.update(F=nn.functional, nn=nn)
    assert "F.sigmoid" in rewrite.sigmoids_in(found) and "nn.functional.sigmoid" in rewrite.sigmoids_in(found)
    found.__globals__["torch"] = nn
    assert "torch.sigmoid" not in rewrite.sigmoids_in(found)


@pytest.mark.parametrize(
    "shapes",
    [((2, 3, 8), (2, 3, 8)), ((2, 3, 8), (2, 3, 1)), ((2, 3, 8), (8,)), ((2, 3, 8), (2, 1, 8)), ((3, 1), (3, 8))],
)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_the_helper_takes_what_multiplication_takes(shapes, dtypes):
    x, g = (torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes))
    torch.testing.assert_close(rewrite.gate(x, g), x * torch.sigmoid(g))
    assert rewrite.gate(2.0, g).dtype == g.dtype


def model_of(name):
    return make(name, **{key: value for key, value in MODELS[name].items() if SIZES.get(key) != value})


def gates(model, ids):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        model(ids)
    return sum(event.count for event in seen.key_averages() if event.key == "liger::sigmoid_gate")


@pytest.mark.parametrize("name", known(MODELS))
def test_models(name):
    model, ids = model_of(name), tokens()
    plain = step(model, ids)
    text = model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False)
    report = apply_liger_kernel(model.train())
    attention = [row for row in report.rows if row.kind == "rope" and row.replacement]
    with path_taken("cpu"):
        assert attention and gates(model, ids) == len(attention)
    assert_same_step(model, ids, plain)
    if name == "afmoe":
        assert_same_step(torch.compile(model, backend="aot_eager"), ids, plain)
    assert gates(through_pickle(model), ids) == len(attention)
    assert torch.equal(model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    unpatch(model)
    assert not gates(model, ids)


def test_the_switch():
    model, ids = model_of("qwen3_next"), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model, sigmoid_gate=False)
    assert not gates(model, ids)
    assert_same_step(model, ids, plain)
