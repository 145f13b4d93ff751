"""Mixture-of-experts layers of transformers, whose experts become one operator."""

import itertools

import pytest
import torch

from liger_ops import functional
from liger_ops.transformers import apply_liger_kernel, experts, register_experts, unpatch
from tests.support.checks import output_of
from tests.support.models.language_models import SIZES, clone, step, tokens
from tests.support.models.patched_models import assert_same_step, wanted_by
from tests.support.models.tiny_models import tiny

MODELS = dict.fromkeys(("mixtral", "qwen3_moe", "glm4_moe", "olmoe", "gpt_oss"), {})
# Which chooses among groups of experts.
MODELS["deepseek_v3"] = {"n_routed_experts": 4, "num_local_experts": 4, "n_group": 2}


def make(name):
    return tiny(name, **MODELS[name]).train()


def rows_of(report):
    return [row for row in report.rows if row.kind == "experts"]


def stack_of(model):
    return next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "num_experts"))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_agrees_with_eager(name):
    model = make(name)
    eager = clone(model, torch.float32)
    eager.config._experts_implementation = "eager"
    rows = rows_of(apply_liger_kernel(model))
    assert rows and all((row.replacement, row.reason) == ("moe_experts", "") for row in rows)
    assert_same_step(model, tokens(), step(eager, tokens()))
    assert unpatch(model) and not rows_of(apply_liger_kernel(model, moe_experts=False, swiglu=False))[0].replacement


@pytest.mark.parametrize("name", MODELS)
def test_transformers_chooses_the_operator_by_name(name):
    register_experts()
    model = make(name)
    chosen, eager = clone(model, torch.float32), clone(model, torch.float32)
    chosen.set_experts_implementation("liger_ops")
    eager.set_experts_implementation("eager")
    assert_same_step(chosen, tokens(), step(eager, tokens()))
    assert stack_of(chosen).liger_experts == experts.identify(stack_of(model))


@pytest.mark.thorough
@pytest.mark.parametrize("order", itertools.permutations(["liger_ops.transformers", "transformers"]), ids=str)
def test_either_package_may_be_imported_first(order):
    code = """
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("mixtral", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                              num_attention_heads=1, num_key_value_heads=1, num_local_experts=2)
model = AutoModelForCausalLM.from_config(config, experts_implementation="liger_ops")
print(model.config._experts_implementation)
"""
    assert output_of("\n".join([*(f"import {name}" for name in order), code])).strip() == "liger_ops"


def test_a_stack_that_the_operator_does_not_compute_is_refused():
    register_experts()
    model = make("qwen3_moe")
    model.set_experts_implementation("liger_ops")
    stack_of(model).has_post_expert_norm = True
    with pytest.raises(
        ValueError, match="experts_implementation='liger_ops': Qwen3MoeExperts: its experts end in a norm"
    ):
        step(model, tokens())


def test_options_are_found():
    gpt_oss = experts.identify(stack_of(make("gpt_oss")))
    assert gpt_oss == experts.Experts("silu", True, True, 7.0, 1.702, 1.0, True)
    assert experts.identify(stack_of(make("qwen3_moe"))) == experts.Experts("silu", False, False, None, 1.0, 0.0, False)


def test_weights_of_routes_keep_their_precision():
    """transformers multiplies by them in fp32."""
    stack = stack_of(make("qwen3_moe")).bfloat16()
    x, index, weight = torch.randn(4, SIZES["hidden_size"]).bfloat16(), torch.tensor([[0, 2]] * 4), torch.rand(4, 2)
    assert apply_liger_kernel(stack).rows[0].replacement == "moe_experts"
    with torch.no_grad():
        exact, rounded = (
            functional.moe_experts(x, stack.gate_up_proj, stack.down_proj, index, w)
            for w in (weight, weight.bfloat16())
        )
        assert torch.equal(stack(x, index, weight), exact) and not torch.equal(exact, rounded)


def test_without_the_switch_only_the_gate_is_replaced():
    (row, *_) = rows_of(apply_liger_kernel(make("qwen3_moe"), moe_experts=False))
    assert (row.replacement, row.reason) == ("swiglu", "moe_experts is switched off")


def test_a_stack_that_computes_something_else():
    """Its gate is known, but a product is scaled."""
    model = make("qwen3_moe")
    stack = stack_of(model)

    class Scaled(type(stack)):
        def forward(self, *args):
            return 2 * super().forward(*args)

    stack.__class__ = Scaled
    row = rows_of(apply_liger_kernel(model))[0]
    assert (row.replacement, row.reason) == ("swiglu", "its experts compute something else")
    stack.has_post_expert_norm = True
    with pytest.raises(experts.NotUnderstood, match="its experts end in a norm"):
        experts.identify(stack)


def test_dropped_experts():
    """With expert parallelism, transformers marks experts of other devices by the number of local experts."""
    stack = stack_of(make("qwen3_moe"))
    apply_liger_kernel(stack)
    x, weight = torch.randn(3, SIZES["hidden_size"]), torch.rand(3, 2)
    index = torch.tensor([[0, 4], [4, 4], [4, 2]])
    out = stack(x, index, weight)
    assert not out[1].any() and out[0].any() and out[2].any()


def test_compiles_to_one_graph():
    stack = stack_of(make("gpt_oss"))
    apply_liger_kernel(stack)
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (5, 9):
        x, index, weight = torch.randn(count, SIZES["hidden_size"]), torch.randint(4, (count, 2)), torch.rand(count, 2)
        torch.testing.assert_close(compiled(x, index, weight), stack(x, index, weight))


# ---- Frozen experts


def test_frozen_experts_have_no_gradient_of_their_weights():
    model = make("qwen3_moe")
    apply_liger_kernel(model)
    layers = len(model.model.layers)
    every = {"x", "gate_up", "down", "weight"}
    assert wanted_by(model) == [every] * layers
    for layer in model.model.layers:
        layer.mlp.experts.requires_grad_(False)
    assert wanted_by(model) == [every - {"gate_up", "down"}] * layers
