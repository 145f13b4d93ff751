"""apply_liger_kernel(fp8=...): linear layers in FP8 while a model trains."""

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from liger_ops import functional as F
from liger_ops.transformers import AutoLigerKernelForCausalLM, apply_liger_kernel, unpatch
from tests.support.models.language_models import make, step, tokens
from tests.support.models.lora_layers import with_adapters
from tests.support.models.patched_models import through_pickle

LAYERS = [f"model.layers.{i}.{name}" for i in range(2) for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)]  # fmt: skip
RECIPES = ("rows", "rows_hp", "tensor", "blocks")
# Multiples of 128, for "blocks".
LARGE = dict(hidden_size=128, intermediate_size=256, head_dim=32, num_key_value_heads=4)


def llama(recipe: str) -> nn.Module:
    return make("llama", **LARGE if recipe == "blocks" else {})


def rows_of(report) -> dict[str, tuple[str, str]]:
    return {row.module: (row.replacement, row.reason) for row in report.rows if row.kind == "linear"}


# The layers of one input, in the order of their calls.
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def formula_in(model: nn.Module, recipe: str, prefix: str = "") -> nn.Module:
    """The layers in question, or the bases of LoRA layers, compute the formula; those of one input, that of all of them."""

    def layer(parent, name):
        found = getattr(parent, name)
        return getattr(found, "base_layer", found)

    for name in LAYERS:
        block, _, child = name.rpartition(".")
        parent = model.get_submodule(prefix + block)
        mine = layer(parent, child)
        group = [layer(parent, n) for n in next((names for names in SHARED if child in names), (child,))]

        def forward(x, of=mine, group=group):
            if of is group[0]:
                weights, sizes = [linear.weight for linear in group], [linear.out_features for linear in group]
                y = F.fp8_projections.reference(x, weights, [], recipe=recipe)
                for linear, part in zip(group, y.split(sizes, -1)):
                    linear.part = part
            return of.__dict__.pop("part")

        mine.forward = forward
    return model


def close(ours, theirs) -> None:
    """In FP8 a difference in the last bit of an operand may round to the next number, 1/16 away."""
    (loss, gradients), (expected, others) = ours, theirs
    assert abs(float(loss - expected)) < 2e-3
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert float((gradient - others[name]).norm()) < 0.05 * float(others[name].norm()), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_step_is_that_of_the_formula(recipe):
    ids = tokens()
    plain = step(llama(recipe).train(), ids)
    expected = step(formula_in(llama(recipe).train(), recipe), ids)
    model = llama(recipe).train()
    report = apply_liger_kernel(model, fp8=recipe)
    assert rows_of(report) == {name: (f"fp8_linear, {recipe}", "") for name in LAYERS}
    found = step(model, ids)
    close(found, expected)
    weight = "model.layers.0.mlp.down_proj.weight"
    # It is in FP8, and not only near it.
    assert not torch.equal(found[0], plain[0])
    assert float((found[1][weight] - plain[1][weight]).norm()) > 1e-3 * float(plain[1][weight].norm())


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Numbers of weights in calls in FP8, and in calls that add adapters."""

    def __init__(self):
        super().__init__()
        self.weights, self.adapters = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # Without gradients: the public operators.
        if function is torch.ops.liger.fp8_linear.default:
            self.weights.append(1)
        if function in (torch.ops.liger._fp8_projections_fwd.default, torch.ops.liger.fp8_projections.default):
            self.weights.append(len(args[1]))
        if function is torch.ops.liger._lora_projections.default:
            self.adapters.append(len(args[1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])  # qwen2: with biases
def test_layers_of_one_input_quantise_it_once(name):
    model = make(name).train()
    apply_liger_kernel(model, fp8="rows")
    with Calls() as seen:
        model(tokens())
    assert seen.weights == 2 * [3, 1, 2, 1]
    model.get_submodule("model.layers.0.self_attn.k_proj").register_forward_hook(lambda *_: None)
    seen = Calls()
    with torch.autocast("cpu", torch.bfloat16), seen:
        model(tokens())
    assert seen.weights == [1, 1, 1, 1, 2, 1, 3, 1, 2, 1]
    with Calls() as seen:
        model.eval()(tokens())
    assert seen.weights == []


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bases_of_lora_layers(order, recipe):
    """They compute in FP8, and the operator adds the adapters to what they return."""
    prefix, ids = "base_model.model.", tokens()
    expected = step(formula_in(with_adapters(llama(recipe)), recipe, prefix).train(), ids)
    model = llama(recipe)
    if order == "before":
        apply_liger_kernel(model, fp8=recipe)
    model = with_adapters(model).train()
    if order == "after":
        found = rows_of(apply_liger_kernel(model, fp8=recipe))
        assert {found.pop(f"{name}.base_layer") for name in LAYERS} == {(f"fp8_linear, {recipe}", "")}
        assert {*found.values()} == {("", "is an adapter")}
    with Calls() as seen:
        found = step(model, ids)
    assert seen.weights == 2 * [3, 1, 2, 1] and seen.adapters == 2 * [3, 1, 2, 1]
    close(found, expected)
    model.eval()
    with Calls() as seen:
        model(ids)
    assert not seen.weights and seen.adapters == 2 * [3, 1, 2, 1]


def test_off_by_default_and_unpatched():
    ids, model = tokens(), make("llama").train()
    plain = step(model, ids)
    assert rows_of(apply_liger_kernel(model)) == {}
    unpatch(model)
    apply_liger_kernel(model, fp8="rows")
    again = apply_liger_kernel(model, fp8="rows")
    assert set(rows_of(again)) == {*LAYERS}
    keys = set(model.state_dict())
    assert unpatch(model) >= len(LAYERS) and set(model.state_dict()) == keys
    assert all(type(m).forward is nn.Linear.forward for m in model.modules() if isinstance(m, nn.Linear))
    found = step(model, ids)
    assert torch.equal(found[0], plain[0]) and all(torch.equal(g, plain[1][n]) for n, g in found[1].items())


@pytest.mark.parametrize(
    "name, recipe", [("tensorwise", "tensor"), ("rowwise", "rows"), ("rowwise_with_gw_hp", "rows_hp")]
)
def test_names_of_torchao(name, recipe):
    named, ours = (rows_of(apply_liger_kernel(make("llama"), fp8=given)) for given in (name, recipe))
    assert named == ours and f"fp8_linear, {recipe}" in str(named)


def test_evaluation_and_generation_are_not_in_fp8():
    ids, model = tokens(), make("llama").eval()
    layer, x = model.get_submodule(LAYERS[-1]), torch.randn(3, 48)
    before, text = layer(x), model.generate(ids[:1], max_new_tokens=4, do_sample=False)
    apply_liger_kernel(model, fp8="rows")
    assert torch.equal(layer(x), before)
    assert torch.equal(model.generate(ids[:1], max_new_tokens=4, do_sample=False), text)
    model.train()
    assert torch.equal(layer(x), F.fp8_linear(x, layer.weight))


def test_what_is_left_alone():
    model = make("llama", intermediate_size=40)
    found = rows_of(apply_liger_kernel(model, fp8="rows", fp8_filter=lambda module, name: "k_proj" not in name))
    assert "lm_head" not in found
    assert found["model.layers.0.mlp.down_proj"] == ("", "its sizes, 40 and 32, must be multiples of 16")
    assert found["model.layers.0.self_attn.k_proj"] == ("", "fp8_filter leaves it out")
    assert found["model.layers.0.self_attn.q_proj"] == ("fp8_linear, rows", "")
    found = rows_of(apply_liger_kernel(make("llama", **LARGE | dict(num_key_value_heads=2)), fp8="blocks"))
    assert found["model.layers.0.self_attn.k_proj"] == ("", "its sizes, 128 and 64, must be multiples of 128")
    assert found["model.layers.0.self_attn.q_proj"] == ("fp8_linear, blocks", "")


class Others(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.proj, self.wrapped = (nn.Linear(32, 32) for _ in range(3))
        self.wrapped.forward = self.wrapped.forward
        self.subclass = type("Float8Linear", (nn.Linear,), {})(32, 32)


def test_layers_of_other_kinds():
    model = nn.ModuleDict({"mlp": Others()})
    found = rows_of(apply_liger_kernel(model, fp8="rows"))
    assert found == {
        "mlp.gate": ("", "may choose experts"),
        "mlp.proj": ("fp8_linear, rows", ""),
        "mlp.wrapped": ("", "its forward was replaced"),
    }


@pytest.mark.parametrize("form", ["fp32", "bf16", "autocast"])
def test_dtypes(form):
    linear, x = nn.Linear(32, 48), torch.randn(5, 32)
    holder = nn.ModuleDict({"proj": linear}).to(torch.bfloat16 if form == "bf16" else torch.float32)
    apply_liger_kernel(holder, fp8="rows")
    x = x.to(linear.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        y, expected = linear(x), F.fp8_linear(x, linear.weight, linear.bias)
    assert y.dtype == (torch.float32 if form == "fp32" else torch.bfloat16) and torch.equal(y, expected)


def test_pickles_and_copies_stay_in_fp8():
    model = make("llama").train()
    apply_liger_kernel(model, fp8="rows_hp", fp8_filter=lambda module, name: "q_proj" in name)
    x = torch.randn(3, 32)
    for other in (through_pickle(model), through_pickle(through_pickle(model))):
        q, k = (other.get_submodule(f"model.layers.0.self_attn.{name}") for name in ("q_proj", "k_proj"))
        assert torch.equal(q(x), F.fp8_linear(x, q.weight, recipe="rows_hp")) and torch.equal(
            k(x), nnf.linear(x, k.weight)
        )


def test_classes_and_configs():
    model = AutoLigerKernelForCausalLM.from_config(make("llama").config, fp8="rows")
    assert type(model.get_submodule(LAYERS[0])).liger_row == ("linear", "fp8_linear, rows")
    model = apply_liger_kernel(type(make("llama")), fp8="rows")(make("llama").config)
    assert type(model.get_submodule(LAYERS[0])).liger_row == ("linear", "fp8_linear, rows")


def test_compiles():
    ids, model = tokens(), make("llama").train()
    apply_liger_kernel(model, fp8="rows")
    expected = step(model, ids)
    close(step(torch.compile(model, backend="aot_eager"), ids), (expected[0], {
        f"_orig_mod.{name}": gradient for name, gradient in expected[1].items()
    }))  # fmt: skip


ALLOWED = "fp8 must be 'rows', 'rows_hp', 'tensor', 'blocks', torchao's 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', or None"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(fp8="columns"), f"{ALLOWED} .got 'columns'."),
        (dict(fp8=True), f"{ALLOWED} .got True."),
        (
            dict(fp8="rows", fp8_filter="q_proj"),
            "fp8_filter must be a function of a module and its name .got 'q_proj'.",
        ),
        (dict(fp8_filter=lambda module, name: True), "fp8_filter must be given with fp8 .got fp8=None."),
    ],
)
def test_errors(options, message):
    with pytest.raises((TypeError, ValueError), match=f"apply_liger_kernel: {message}"):
        apply_liger_kernel(make("llama"), **options)
