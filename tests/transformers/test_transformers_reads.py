"""Modules that change after the patch: an operator obeys the change, or the module runs its own forward."""

import copy

import pytest
import torch
from torch import nn

from benchmarks import changed_numbers
from liger_ops.transformers import apply_liger_kernel, reads
from tests.support.models.language_models import make, step, tokens
from tests.support.models.patched_models import assert_same_step, calls_of
from tests.support.models.tiny_models import tiny

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}


def both(name):
    plain = tiny(name, **(EXPERTS if name in ("mixtral", "gpt_oss") else {}))
    ours = copy.deepcopy(plain)
    assert apply_liger_kernel(ours).replaced
    return plain, ours


def setting(path, value):
    """Sets an attribute of a module to a value."""

    def change(model):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value() if isinstance(value, type) else value)

    return change


MLP, EMBEDDING = "model.layers.0.mlp", "model.embed_tokens"
CHANGES = [
    ("llama", f"{MLP}.act_fn", nn.ReLU),
    ("llama", f"{EMBEDDING}.max_norm", 0.05),
    ("llama", f"{EMBEDDING}.scale_grad_by_freq", True),
    ("gemma2", f"{MLP}.act_fn.act", nn.functional.relu),
    ("mixtral", f"{MLP}.experts.act_fn", nn.ReLU),
    ("gpt_oss", f"{MLP}.experts.limit", 0.01),
    ("gpt_oss", f"{MLP}.experts.alpha", 0.3),
    ("deepseek_v4", f"{MLP}.shared_experts.limit", 0.02),
    ("deepseek_v4", f"{MLP}.gate.score_fn", nn.Sigmoid),
    ("falcon_h1", "model.layers.0.feed_forward.gate_multiplier", 0.5),
    ("falcon_h1", "model.layers.0.feed_forward.down_multiplier", 0.5),
    ("qwen3_next", "model.layers.0.linear_attn.norm.activation", "sigmoid"),
]


@pytest.mark.parametrize("name, path, value", CHANGES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_changes_after_the_patch(name, path, value):
    plain, ours = both(name)
    ids, change = tokens(), setting(path, value)
    before = step(plain, ids)
    change(plain)
    change(ours)
    expected = step(plain, ids)
    assert any(not torch.allclose(g, before[1][n], rtol=1e-2) for n, g in expected[1].items())
    assert_same_step(ours, ids, expected)


@pytest.mark.parametrize("name, path", [
    ("llama", f"{MLP}.act_fn"), ("mixtral", f"{MLP}.experts.act_fn"), ("deepseek_v4", f"{MLP}.gate.score_fn"),
    ("deepseek_v4", "model.layers.0.attn_hc.input_norm"),
])  # fmt: skip
def test_hooks_run(name, path):
    plain, ours = both(name)
    ids, seen = tokens(), {}
    for model in (plain, ours):
        child, shapes = model.get_submodule(path), seen.setdefault(id(model), [])

        def hook(_, inputs, out, shapes=shapes):
            shapes.append(inputs[0].shape)
            return 2 * out

        child.register_forward_hook(hook)
    expected = step(plain, ids)
    found = step(ours, ids)
    assert seen[id(plain)] and seen[id(ours)] == seen[id(plain)]
    for n, gradient in expected[1].items():
        torch.testing.assert_close(found[1][n], gradient, rtol=1e-3, atol=1e-5)


def test_the_operator_returns_with_its_numbers():
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model)
    mlp, used = model.model.layers[0].mlp, calls_of("swiglu_linear", model, ids)
    handle = mlp.act_fn.register_forward_hook(lambda *_: None)
    assert calls_of("swiglu_linear", model, ids) == used - 1
    handle.remove()
    kept, mlp.act_fn = mlp.act_fn, nn.Identity()
    assert calls_of("swiglu_linear", model, ids) == used - 1
    mlp.act_fn = kept
    assert calls_of("swiglu_linear", copy.deepcopy(model), ids) == used == calls_of("swiglu_linear", model, ids)


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v4", "qwen3_next"])
def test_probes_call_no_hooks(name):
    model, seen = tiny(name), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
        module.register_forward_pre_hook(lambda *_: seen.append(1))
    assert apply_liger_kernel(model).replaced
    assert not seen


def test_compiled():
    plain, ours = both("llama")
    torch._dynamo.reset()
    compiled = torch.compile(ours.model.layers[0].mlp, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 32, requires_grad=True)
    torch.testing.assert_close(compiled(x), plain.model.layers[0].mlp(x))
    for model in (plain, ours):
        setting(f"{MLP}.act_fn", nn.ReLU)(model)
    torch.testing.assert_close(compiled(x), plain.model.layers[0].mlp(x))


class Passing(nn.Module):
    size, hidden = 3, 4

    def forward(self, x):
        return self.scaled(x) * self.factor + getattr(self, "shift")  # noqa: B009

    def scaled(self, x):
        return x * self.size


class Reading(Passing):
    def forward(self, x):
        return [self.scaled(y) + self.own for y in x]

    @property
    def own(self):
        return self.hidden


def test_names_come_from_methods_and_properties():
    names, passes = reads.names_read(Reading, "forward")
    assert {"size", "scaled", "own", "hidden"} <= names and passes
    names, passes = reads.names_read(type("Plain", (Passing,), {"forward": lambda self, x: self.scaled(x)}), "forward")
    assert {"size", "scaled"} <= names and passes  # of the base, which its forward might call


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3n_text", "gpt_oss", "deepseek_v4", "falcon_h1", "apertus", "qwen3_next", "lfm2_moe", "olmo2"],
)
def test_numbers_of_whole_models(name):
    result = changed_numbers.compare(name)
    assert result["outcome"] == "obeys" and result["counted"]["numbers"], result
