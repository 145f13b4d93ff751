"""Output gates of attention and of shared experts become sigmoid_gate, and nothing else changes."""

import ast
from functools import partial

import pytest
import torch
from checks import path_taken
from hybrid_models import WITH_CONVOLUTIONS
from language_models import SIZES, known, make, step, tokens
from patched_models import assert_same_step, calls_of, through_pickle
from rewriting import after, function
from torch import nn

from liger_ops.transformers import apply_liger_kernel, rewrite, unpatch

gates = partial(calls_of, "sigmoid_gate")
SIGMOIDS = frozenset({"torch.sigmoid", "F.sigmoid"})
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA = {**HEADS, "layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
MODELS = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "qwen2_moe": EXPERTS,
    "qwen4_exp_text": WITH_CONVOLUTIONS["qwen4_exp_text"],
    "afmoe": {},
}
# Of attention and of shared experts.
COUNTS = {"qwen3_next": (1, 2), "qwen3_5_text": (1, 0), "qwen3_5_moe_text": (1, 2), "qwen2_moe": (0, 2)}
COUNTS |= {"qwen4_exp_text": (1, 2), "afmoe": (2, 0)}
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
ADDED = {
    "y = y * torch.sigmoid(self.g(x))\nx = x + y": "x = liger_gate(y, self.g(x), x)",
    "y = F.sigmoid(gate) * y\nx = y + x\nreturn x.mean()": "x = liger_gate(y, gate, x)\nreturn x.mean()",
}
NOT_ADDED = [
    "y = y * torch.sigmoid(gate)\nx += y",  # others may hold x's tensor
    "y = y * torch.sigmoid(gate)\nx = x - y",
    "y = y * torch.sigmoid(gate)\nx = y + y",
    "y = y * torch.sigmoid(gate)\nz = x + y",
    "y = y * torch.sigmoid(gate)\nx = x + y\nreturn x, y",
    "y = y * torch.sigmoid(gate)\nprint(y)\nx = x + y",
    "f = lambda: y\ny = y * torch.sigmoid(gate)\nx = x + y\nreturn f()",
    "for _ in x:\n    y = y * torch.sigmoid(gate)\n    x = x + y",
]


def gated_addition(block, sigmoids, function):
    return rewrite.fuse_gates(block, sigmoids, function) or rewrite.fuse_gated_additions(block, sigmoids, function)


@pytest.mark.parametrize("body", ADDED)
def test_gates_and_additions_are_merged(body):
    assert after(gated_addition, body, SIGMOIDS) == ADDED[body]


@pytest.mark.parametrize("body", NOT_ADDED)
def test_other_additions_stay(body):
    merged = after(gated_addition, body, SIGMOIDS)
    assert ast.unparse(ast.parse(body)).count("\n") == (merged or body).count("\n")


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
    for residual in (torch.randn(2, 3, 8), torch.randn(8).bfloat16(), 2.0):
        torch.testing.assert_close(
            rewrite.gate(x, g, residual), residual + x * torch.sigmoid(g), rtol=2**-7, atol=2**-7
        )


def model_of(name):
    return make(name, **{key: value for key, value in MODELS[name].items() if SIZES.get(key) != value})


@pytest.mark.parametrize("name", known(MODELS))
def test_models(name):
    model, ids = model_of(name), tokens()
    plain = step(model, ids)
    text = model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False)
    report = apply_liger_kernel(model.train())
    shared = [row for row in report.rows if row.kind == "gate"]
    assert [row.replacement for row in shared] == ["sigmoid_gate"] * COUNTS[name][1]
    with path_taken("cpu"):
        assert gates(model, ids) == sum(COUNTS[name])
    assert_same_step(model, ids, plain)
    if name == "afmoe":
        assert_same_step(torch.compile(model, backend="aot_eager"), ids, plain)
    assert gates(through_pickle(model), ids) == sum(COUNTS[name])
    assert torch.equal(model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    unpatch(model)
    assert not gates(model, ids)


def test_the_switch():
    model, ids = model_of("qwen3_next"), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model, sigmoid_gate=False)
    assert {row.reason for row in report.rows if row.kind == "gate"} == {"sigmoid_gate is switched off"}
    assert not gates(model, ids)
    assert_same_step(model, ids, plain)
