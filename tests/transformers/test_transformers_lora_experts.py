"""Adapters of peft on the weights of experts (target_parameters), which the operator of the experts adds."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_ops.transformers import adapted_experts, apply_liger_kernel, register_experts, unpatch
from tests.support.checks import assert_no_worse_overall
from tests.support.models.language_models import SIZES, step, tokens
from tests.support.models.patched_models import (
    assert_same_logits,
    assert_same_step,
    logits_of,
    through_pickle,
    wanted_by,
)
from tests.support.models.tiny_models import tiny

peft = pytest.importorskip("peft")

GATE_UP, BOTH = ("experts.gate_up_proj",), ("experts.gate_up_proj", "experts.down_proj")
TARGETS = pytest.mark.parametrize(
    "targets", [GATE_UP, ("experts.down_proj",), BOTH], ids=["gate_up_proj", "down_proj", "both"]
)
NAMES = pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])


def make(name, dtype=torch.float32):
    model = tiny(name, dtype=dtype).train()
    model.config._experts_implementation = "eager"
    return model


def lora(targets=BOTH, **options):
    return peft.LoraConfig(r=3, target_modules=[], target_parameters=[*targets], init_lora_weights=False, **options)


def with_lora(model, targets=BOTH, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora(targets, **options))


def adapted_rows(report):
    return [(row.replacement, row.reason) for row in report.rows if row.type == "ParamWrapper"]


class Merged(TorchDispatchMode):
    """Counts the tensors of a weight's shape that operators make."""

    def __init__(self, model):
        super().__init__()
        self.shapes = {p.shape for name, p in model.named_parameters() if p.dim() == 3}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.shape in self.shapes:
                self.count += t.untyped_storage().data_ptr() not in known
        return out


def merged_by(model):
    with Merged(model) as mode:
        step(model, tokens())
    return mode.count


@TARGETS
@NAMES
@pytest.mark.parametrize("order", ["before", "after", "before and after", "chosen by name"])
def test_a_step_agrees_with_peft(name, order, targets):
    model, eager = make(name), with_lora(make(name), targets)
    if order.startswith("before"):
        apply_liger_kernel(model)
    model = with_lora(model, targets)
    layers = model.config.num_hidden_layers
    if order.endswith("after"):
        assert adapted_rows(apply_liger_kernel(model)) == [("moe_experts", "")] * (len(targets) * layers)
    elif order == "chosen by name":
        register_experts()
        model.get_base_model().set_experts_implementation("liger_ops")
    # Frozen weights have no gradients. Below the first layer nothing needs one.
    learned = {f"{target[8:-5]}_{adapter}" for target in targets for adapter in "ab"}
    assert wanted_by(model) == [{"x", "weight", *learned}] * (layers - 1) + [learned]
    expected = step(eager, tokens())
    assert_same_step(model, tokens(), expected)
    assert len(expected[1]) == 2 * len(targets) * layers and all("lora" in name for name in expected[1])
    assert merged_by(eager) > 0 and (merged_by(model) == 0) == order.endswith("after")
    assert not any("liger_adapters" in vars(m) for m in model.modules())


def states(model):
    """(what is done, what then computes) one after the other."""
    layers = [m for m in model.modules() if adapted_experts.wraps_parameter(m)]
    yield "as it is", model
    with model.disable_adapter():
        yield "disabled", model
    for layer in layers:
        layer.set_scale("default", 3.0)
    yield "with another scale", model
    torch.manual_seed(2)
    model.add_adapter("other", lora(lora_alpha=5))
    yield "with one of two adapters", model
    model.base_model.set_adapter(["default", "other"])
    yield "with two adapters", model
    model.base_model.set_adapter("other")
    yield "with the other", model
    model.delete_adapter("default")
    yield "with a deleted adapter", model
    model.merge_adapter()
    yield "merged", model
    model.unmerge_adapter()
    yield "unmerged", model


@NAMES
def test_everything_that_peft_does_with_adapters(name):
    eager, model = (with_lora(make(name)).eval() for _ in range(2))
    apply_liger_kernel(model)
    for (what, theirs), (_, ours) in zip(states(eager), states(model), strict=True):
        expected = logits_of(theirs, tokens())
        assert_same_logits(logits_of(ours, tokens()), expected, ours, tokens())
        with Merged(model) as mode:
            logits_of(ours, tokens())
        assert mode.count == 0, what


@NAMES
def test_saving_and_loading(name, tmp_path):
    model = with_lora(make(name)).eval()
    expected = logits_of(model, tokens())
    keys = [*model.state_dict()]
    apply_liger_kernel(model)
    found = logits_of(model, tokens())
    assert [*model.state_dict()] == keys
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make(name), tmp_path).eval()
    assert torch.equal(logits_of(again, tokens()), expected)
    for other in (through_pickle(model), copy.deepcopy(model)):
        assert torch.equal(logits_of(other, tokens()), found) and merged_by(other.train()) == 0
    unpatch(model)
    assert torch.equal(logits_of(model, tokens()), expected) and merged_by(model.train()) > 0


@NAMES
def test_checkpointing(name):
    eager, model = (with_lora(make(name)) for _ in range(2))
    expected = step(eager, tokens())
    apply_liger_kernel(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(model, tokens(), expected)
    assert merged_by(model) == 0


def test_fp32_adapters_of_a_bf16_base_are_at_least_as_accurate():
    """peft rounds the adapters to bf16."""
    start = with_lora(make("qwen3_moe", torch.bfloat16))
    assert {p.dtype for name, p in start.named_parameters() if "lora" in name} == {torch.float32}
    eager, exact, model = copy.deepcopy(start), copy.deepcopy(start).double(), copy.deepcopy(start)
    others = dict.fromkeys(("rope", "rms_norm", "embedding", "fused_linear_cross_entropy", "cross_entropy"), False)
    assert {r for r, _ in adapted_rows(apply_liger_kernel(model, **others))} == {"moe_experts"}
    (_, oracle), (_, theirs), (_, ours) = (step(m, tokens()) for m in (exact, eager, model))

    ours, theirs = ([found[name] for name in oracle] for found in (ours, theirs))
    assert_no_worse_overall(ours, theirs, [*oracle.values()])


# ---- What peft does itself


@pytest.mark.parametrize(
    "switches, reason",
    [
        ({"lora": False}, "lora is switched off"),
        ({"moe_experts": False}, "its experts: moe_experts is switched off"),
        ({"swiglu": False}, "swiglu is switched off"),
    ],
)
def test_switches(switches, reason):
    eager, model = (with_lora(make("qwen3_moe")) for _ in range(2))
    expected = step(eager, tokens())
    assert adapted_rows(apply_liger_kernel(model, **switches)) == [("", reason)] * 4
    assert_same_step(model, tokens(), expected)


def test_stacks_that_are_not_understood():
    model = with_lora(make("qwen3_moe"))
    for layer in model.get_base_model().model.layers:
        layer.mlp.experts.get_base_layer().forward = lambda *args: args[0]
    assert set(adapted_rows(apply_liger_kernel(model))) == {("", "the forward of its experts was replaced")}


def test_an_adapter_with_another_layout(monkeypatch):
    wrapper = peft.tuners.lora.layer.ParamWrapper
    theirs = wrapper.get_delta_weight
    monkeypatch.setattr(wrapper, "get_delta_weight", lambda self, adapter: 2 * theirs(self, adapter))
    rows = adapted_rows(apply_liger_kernel(with_lora(make("qwen3_moe"))))
    assert set(rows) == {("", "its adapter has another layout")}


def test_a_stack_that_is_unpatched_alone():
    eager, model = (with_lora(make("qwen3_moe")) for _ in range(2))
    apply_liger_kernel(model)
    for layer in model.get_base_model().model.layers:
        unpatch(layer.mlp.experts.get_base_layer())
    assert_same_step(model, tokens(), step(eager, tokens()))


def test_compiles_to_one_graph():
    model = with_lora(make("gpt_oss"))
    apply_liger_kernel(model)
    stack = model.get_base_model().model.layers[0].mlp.experts
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (5, 9):
        x, index, weight = torch.randn(count, SIZES["hidden_size"]), torch.randint(4, (count, 2)), torch.rand(count, 2)
        torch.testing.assert_close(compiled(x, index, weight), stack(x, index, weight))
