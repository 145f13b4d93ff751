"""Mixture-of-experts layers of transformers, whose experts become one operator."""

import pytest
import torch
from language_models import ARCHITECTURES, MOE, SIZES, clone, step, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from liger_ops.transformers import apply_liger_kernel, experts, register_experts, unpatch

MODELS = {
    **{name: ARCHITECTURES[name] for name in ("mixtral", "qwen3_moe", "glm4_moe")},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
        **MOE,
    },
}  # fmt: skip


def make(name):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).train()


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
    (ours, our_gradients), (theirs, their_gradients) = step(model, tokens()), step(eager, tokens())
    torch.testing.assert_close(ours, theirs)
    for parameter, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[parameter], gradient, rtol=1e-4, atol=1e-6)
    assert unpatch(model) and not rows_of(apply_liger_kernel(model, moe_experts=False, swiglu=False))[0].replacement


@pytest.mark.parametrize("name", MODELS)
def test_transformers_chooses_the_operator_by_name(name):
    register_experts()
    model = make(name)
    chosen, eager = clone(model, torch.float32), clone(model, torch.float32)
    chosen.set_experts_implementation("liger_ops")
    eager.set_experts_implementation("eager")
    (ours, our_gradients), (theirs, their_gradients) = step(chosen, tokens()), step(eager, tokens())
    torch.testing.assert_close(ours, theirs)
    for parameter, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[parameter], gradient, rtol=1e-4, atol=1e-6)
    assert stack_of(chosen).liger_experts == experts.identify(stack_of(model))


def test_a_stack_that_the_operator_does_not_compute_is_refused():
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
