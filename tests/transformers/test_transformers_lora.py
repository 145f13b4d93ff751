"""LoRA layers of peft in patched models."""

import contextlib
import copy
import io
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from checks import assert_no_worse, count_graphs
from language_models import make, step, tokens, train
from patched_models import assert_as_exact, assert_same_logits, assert_same_step, logits_of, own_names
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

from liger_ops import projections
from liger_ops._accuracy import Roundings, rounded
from liger_ops.transformers import apply_liger_kernel, unpatch

pytestmark = pytest.mark.usefixtures("as_large_models")

# Projections in one call: q, k and v; o; gate and up; down.
CALLS = [3, 1, 2, 1]
LAYERS = 2
BASE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Call(NamedTuple):
    projections: int
    adapters: int


@pytest.fixture
def calls(monkeypatch):
    """Of lora_projections, and of gated_lora_projection, which projects a product."""
    found, function, gated = [], projections.lora_projections, projections.gated_lora_projection

    def recorded(x, weights, biases, a, b, scale, of):
        found.append(Call(len(weights), len(a)))
        return function(x, weights, biases, a, b, scale, of)

    def recorded_gated(op, options, gate, up, weight, bias, a, b, scale):
        found.append(Call(1, len(a)))
        return gated(op, options, gate, up, weight, bias, a, b, scale)

    monkeypatch.setattr(projections, "lora_projections", recorded)
    monkeypatch.setattr(projections, "gated_lora_projection", recorded_gated)
    return found


def taken(calls):
    """The sizes of the calls since the last time."""
    found = [call.projections for call in calls]
    calls.clear()
    return found


def with_adapters(model, adapter_dtype=None, **options):
    torch.manual_seed(1)
    # B is zero at the start of a training: no gradient would reach A.
    given = {"r": 4, "lora_alpha": 6, "target_modules": BASE, "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**given), autocast_adapter_dtype=adapter_dtype != torch.bfloat16)


def build(order, name="llama", dtype=torch.float32, adapter_dtype=None, switches=None, **options):
    """order: "" for peft's own, or when the model is patched: "before" or "after" it gets its adapters."""
    model, report = make(name, dtype=dtype), None
    if order == "before":
        report = apply_liger_kernel(model, **(switches or {}))
    model = with_adapters(model, adapter_dtype, **options)
    if order == "after":
        report = apply_liger_kernel(model, **(switches or {}))
    return model, report


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLinear)]


def lora_rows(report):
    return Counter((row.replacement, row.reason) for row in report.rows if row.kind == "lora")


# ---- The same numbers


def results(model, ids):
    """Logits, loss and gradients of the adapters."""
    logits = logits_of(model.eval(), ids)
    loss, gradients = step(model.train(), ids)
    assert gradients and all("lora_" in name for name in gradients)
    return {"logits": logits, "loss": loss, **gradients}


def assert_as_accurate(ours, theirs, model, ids, precision):
    """ours, theirs: results of two codes for the model. model: with peft's own code, which becomes fp64."""
    model = copy.deepcopy(model).double()
    exact, parameters = results(model, ids), [*model.parameters()]
    saved = [p.detach().clone() for p in parameters]

    def of_rounded(draw):
        for p, value in zip(parameters, rounded(saved, precision, draw)):
            p.data.copy_(value.detach())
        return [*results(model, ids).values()]

    bounds = Roundings([*exact.values()], of_rounded, saved, precision, smooth=True)
    scale = max(float(exact[name].abs().max()) for name in exact if "lora_" in name)
    assert ours.keys() == theirs.keys() == exact.keys()
    for i, name in enumerate(exact):
        of = scale if "lora_" in name else 0.0
        assert_no_worse(name, ours[name], theirs[name], exact[name], of, bounds=(bounds, i))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "dtype, adapter_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
def test_results_are_as_accurate_as_those_of_peft(name, dtype, adapter_dtype, order, calls):
    plain, _ = build("", name, dtype, adapter_dtype)
    assert {p.dtype for n, p in plain.named_parameters() if "lora_" in n} == {adapter_dtype}
    ids, keys = tokens(), plain.state_dict().keys()
    theirs = results(plain, ids)
    assert not taken(calls)
    model, _ = build(order, name, dtype, adapter_dtype)
    ours = results(model, ids)
    assert taken(calls) == 2 * LAYERS * CALLS
    assert model.state_dict().keys() == keys
    assert_as_accurate(ours, theirs, plain, ids, dtype)


@pytest.mark.parametrize("order", ["before", "after"])
def test_projections_without_adapters_join_the_call(order, calls):
    options = {"target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"v_proj": 7}, "use_rslora": True}
    ids, expected = tokens(), step(build("", **options)[0], tokens())
    model, report = build(order, **options)
    assert_same_step(model, ids, expected)
    calls.clear()
    step(model, ids)
    assert [(call.projections, call.adapters) for call in calls] == LAYERS * [(3, 2), (2, 1)]


@pytest.mark.parametrize("name, expected", [("phi3", [1, 1, 1, 1]), ("qwen3", CALLS), ("mixtral", CALLS[:2])])
@pytest.mark.parametrize("order", ["before", "after"])
def test_other_models(name, expected, order, calls):
    targets = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "mixtral": BASE[:4]}.get(name, BASE)
    ids, plain = tokens(), step(build("", name, target_modules=targets)[0], tokens())
    model, _ = build(order, name, target_modules=targets)
    assert_same_step(model, ids, plain)
    calls.clear()
    step(model, ids)
    assert taken(calls) == LAYERS * expected


def test_only_one_of_a_and_b_is_trained(calls):
    ids, found = tokens(), []
    for order in ("", "after"):
        model, _ = build(order)
        for name, p in model.named_parameters():
            p.requires_grad_("lora_B" in name)
        found.append((model, step(model, ids)))
    (_, expected), (model, _) = found
    assert all("lora_B" in name for name in expected[1]) and taken(calls)
    assert_same_step(model, ids, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
def test_gradient_checkpointing(order, reentrant, calls):
    plain, ids = build("")[0], tokens()
    expected = step(plain, ids)
    model, _ = build(order)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same_step(model, ids, expected)
    calls.clear()
    step(model, ids)
    # A checkpoint may end before the last projection, which saves nothing that another needs.
    assert len(calls) >= 2 * LAYERS * len(CALLS) - LAYERS


def test_twenty_steps_of_training_end_as_those_of_peft(calls):
    """As test_training_is_as_accurate_as_eager in test_transformers_experts.py, with its factor."""
    errors = {"ours": defaultdict(lambda: 1.0), "eager": defaultdict(lambda: 1.0)}
    for seed in range(2):
        start = with_adapters(make("llama", seed), init_lora_weights=True)
        exact, found = train(copy.deepcopy(start).double(), 20), {"eager": train(copy.deepcopy(start), 20)}
        apply_liger_kernel(start)
        assert not calls
        found["ours"] = train(start, 20)
        assert taken(calls) == 21 * LAYERS * CALLS
        for who, result in found.items():
            for key, wanted in exact.items():
                error = float((result[key] - wanted).pow(2).mean().sqrt()) / float(wanted.abs().max())
                errors[who][key] *= error**0.5
    for key, error in errors["ours"].items():
        assert error <= 8 * errors["eager"][key] + torch.finfo(torch.float32).eps, key
    # The same eight batches.
    assert float(exact["losses"][-8:].mean()) < float(exact["losses"][4:12].mean())


def test_compiled_models_have_one_graph(calls):
    torch._dynamo.reset()
    plain, _ = build("")
    model, _ = build("after")
    backend, graphs = count_graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(2):
        ids = tokens(seed=seed)
        loss, gradients = step(plain, ids)
        ours = step(compiled, ids)
        # The recording is traced too.
        assert len(graphs) == 1 and taken(calls) == LAYERS * CALLS
        found = [ours[0]], [own_names(ours[1])[name] for name in gradients]

        def run(ids=ids):
            loss, gradients = step(plain, ids)
            return [loss], [*gradients.values()]

        assert_as_exact(run, ([loss], [*gradients.values()]), plain, found)
    torch._dynamo.reset()


@pytest.fixture
def process_group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("patched", ["before", "after", "sharded"])
@pytest.mark.usefixtures("process_group")
def test_fully_sharded_models(patched, calls):
    plain, ids = build("")[0], tokens()
    expected = step(plain, ids)
    model, _ = build(patched)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if patched == "sharded":
        report = apply_liger_kernel(model)
        reason = "peft's own forward unless its weights are gathered"
        assert lora_rows(report) == {("lora_linear", reason): 7 * LAYERS}
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert taken(calls) == LAYERS * CALLS
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}

    def run():
        loss, gradients = step(plain, ids)
        return [loss], [*gradients.values()]

    found = [loss.detach()], [gradients[name] for name in expected[1]]
    assert_as_exact(run, ([expected[0]], [*expected[1].values()]), plain, found)


# ---- What peft does with its layers


def second_adapter(model, **options):
    torch.manual_seed(2)
    given = {"r": 3, "lora_alpha": 5, "target_modules": BASE, "init_lora_weights": False, **options}
    model.add_adapter("other", LoraConfig(**given))


def switch(model):
    second_adapter(model)
    model.set_adapter("other")


def two_adapters(model):
    second_adapter(model)
    model.base_model.set_adapter(["default", "other"])


def only_on_q(model):
    second_adapter(model, target_modules=["q_proj"])
    model.set_adapter("other")


def unmerge(model):
    model.merge_adapter()
    model.unmerge_adapter()


def disable_merged(model):
    model.merge_adapter()
    return model.disable_adapter()


def enable_again(model):
    with model.disable_adapter():
        pass


def set_scale(model):
    for layer in lora_layers(model):
        layer.set_scale("default", 3.0)


def scale_and_unscale(model):
    for layer in lora_layers(model):
        layer.scale_layer(3.0)
        layer.unscale_layer(2.0)


def delete(model):
    two_adapters(model)
    model.delete_adapter("default")
    model.set_adapter("other")


def combine(model):
    second_adapter(model)
    model.add_weighted_adapter(["default", "other"], [0.5, 0.7], "both", combination_type="cat")
    model.set_adapter("both")


def merge(model):
    model.merge_adapter()


def disable(model):
    return model.disable_adapter()


# With the calls of a layer.
OPERATIONS = [
    (merge, []), (unmerge, CALLS), (disable, []), (disable_merged, []), (enable_again, CALLS), (switch, CALLS),
    (two_adapters, CALLS), (only_on_q, CALLS[:1]), (set_scale, CALLS), (scale_and_unscale, CALLS), (delete, CALLS),
    (combine, CALLS),
]  # fmt: skip


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("operation, expected", OPERATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_operations_of_peft(operation, expected, order, calls):
    ids, found = tokens(), []
    for model, _ in (build(""), build(order)):
        model.eval()
        logits_of(model, ids)  # with the state before the operation
        calls.clear()
        context = operation(model) or contextlib.nullcontext()
        with context:
            found.append((logits_of(model, ids), {name: t.clone() for name, t in model.state_dict().items()}))
            if len(found) == 2:
                assert taken(calls) == LAYERS * expected
                assert_same_logits(found[1][0], found[0][0], model, ids)
    (_, theirs), (_, ours) = found
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_two_adapters_are_one_call(calls):
    model, _ = build("after")
    two_adapters(model)
    logits_of(model, tokens())
    assert [call.adapters for call in calls] == LAYERS * [2 * n for n in CALLS]


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_adapter_for_each_row_is_left_to_peft(order, calls):
    ids, found = tokens(), []
    for model, _ in (build(""), build(order)):
        second_adapter(model)
        with torch.no_grad():
            found.append(model.eval()(input_ids=ids, adapter_names=["other", "__base__"]).logits)
    assert not calls

    def run():
        with torch.no_grad():
            return [[model(input_ids=ids, adapter_names=["other", "__base__"]).logits]]

    assert_as_exact(run, [found[:1]], model, [found[1:]])


@pytest.mark.parametrize("order", ["before", "after"])
def test_merged_for_good(order, calls):
    ids, found = tokens(), []
    for model, _ in (build(""), build(order)):
        merged = model.merge_and_unload()
        assert not lora_layers(merged)
        found.append(logits_of(merged.eval(), ids))
    assert not calls
    assert_same_logits(found[1], found[0], merged, ids)


@pytest.mark.parametrize("order", ["before", "after"])
def test_saved_and_loaded(order, tmp_path, calls):
    ids, (plain, _), (model, _) = tokens(), build(""), build(order)
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "theirs")
    files = [(tmp_path / who / "adapter_model.safetensors").read_bytes() for who in ("ours", "theirs")]
    assert files[0] == files[1]
    base = make("llama")
    if order == "before":
        apply_liger_kernel(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours")
    if order == "after":
        apply_liger_kernel(loaded)
    logits = logits_of(loaded.eval(), ids)
    assert taken(calls) == LAYERS * CALLS
    assert_same_logits(logits, logits_of(plain.eval(), ids), loaded, ids)


@pytest.mark.parametrize("order", ["before", "after"])
def test_modules_to_save(order, calls):
    options = {"modules_to_save": ["lm_head", "norm"]}
    ids, expected = tokens(), step(build("", **options)[0], tokens())
    assert any("lm_head" in name for name in expected[1])
    model, _ = build(order, **options)
    assert_same_step(model, ids, expected)
    assert set(taken(calls)) == set(CALLS)


# ---- Why peft's own forward runs


class Pair(nn.Module):
    """Two projections of one input."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.q, self.k = nn.Linear(6, 8, dtype=dtype), nn.Linear(6, 4, dtype=dtype)

    def forward(self, x):
        return projections.project((self.q, self.k), x)


class OtherLinear(nn.Linear):
    pass


def other_base(model):
    model.q.base_layer.__class__ = OtherLinear


def hook(*path):
    def add(model):
        model.q.get_submodule(".".join(path)).register_forward_hook(lambda module, given, result: result * 2)

    return add


def attribute(name, value):
    return lambda model: setattr(model.q, name, value)


def parametrized(model):
    parametrize.register_parametrization(model.q.base_layer, "weight", nn.Softplus())


def other_dtype(model):
    model.q.lora_A.to(torch.bfloat16)
    model.q.lora_B.to(torch.bfloat16)


def scale_of_tensor(model):
    model.q.scaling["default"] = torch.tensor(2.0)


def merged_then_disabled(model):
    model.q.merge()
    model.q.enable_adapters(False)


def own_dropout(model):
    model.q.lora_dropout["default"] = nn.AlphaDropout(0.0)


# reason, options of the adapters, change
REASONS = [
    ("has dropout", {"lora_dropout": 0.5}, None),
    ("is the variant Dora", {"use_dora": True}, None),
    ("its adapter has a bias", {"lora_bias": True}, None),
    ("base is OtherLinear", {}, other_base),
    ("base is ParametrizedLinear", {}, parametrized),
    ("base is hooked or wrapped", {}, hook("base_layer")),
    ("its A is hooked or wrapped", {}, hook("lora_A", "default")),
    ("its B is hooked or wrapped", {}, hook("lora_B", "default")),
    ("its dropout is hooked or replaced", {}, hook("lora_dropout", "default")),
    ("its dropout is hooked or replaced", {}, own_dropout),
    ("its weight is transposed", {}, attribute("fan_in_fan_out", True)),
    ("its A is torch.bfloat16, its B torch.bfloat16, its input torch.float32", {}, other_dtype),
    ("its scale is no number", {}, scale_of_tensor),
    ("is disabled while merged", {}, merged_then_disabled),
]


def adapted_pair(options, change, dtype=torch.float32):
    torch.manual_seed(0)
    model = get_peft_model(
        Pair(dtype), LoraConfig(r=2, target_modules=["q", "k"], **{"init_lora_weights": False, **options})
    )
    if change is not None:
        change(model.base_model.model)
    return model.base_model.model


@pytest.mark.parametrize("reason, options, change", REASONS)
def test_reasons(reason, options, change, calls):
    x = torch.randn(3, 6)
    theirs, ours = adapted_pair(options, change), adapted_pair(options, change)
    assert projections.adapted(ours.q, x.dtype) == reason
    rows = {row.module: row for row in apply_liger_kernel(ours).rows}
    dropout = reason == "has dropout"
    said = "has dropout: peft's own forward in training" if dropout else reason
    assert (rows["q"].replacement, rows["q"].reason) == ("lora_linear" if dropout else "", said)
    together, apart = lambda model: model(x), lambda model: (model.q(x), model.k(x))
    for called in (together, apart):
        calls.clear()
        outputs = []
        for model, call in ((theirs, apart), (ours, called)):
            torch.manual_seed(3)
            outputs.append([y.detach() for y in call(model)])
        # The change is one of q alone.
        assert len(calls) == (0 if options else 1)
        for expected, y in zip(*outputs):
            torch.testing.assert_close(y, expected)


def test_inputs_that_are_not_cast(calls):
    model = adapted_pair({}, attribute("cast_input_dtype_enabled", False))
    assert isinstance(projections.adapted(model.q, torch.float32), projections.Adapted)
    half = adapted_pair({}, attribute("cast_input_dtype_enabled", False), torch.bfloat16)
    assert projections.adapted(half.q, torch.bfloat16) == "does not cast its input"
    apply_liger_kernel(half)
    with pytest.raises(RuntimeError, match="dtype"):
        half.q(torch.randn(3, 6, dtype=torch.bfloat16))
    assert not calls


def test_inputs_of_another_dtype_than_the_base(calls):
    model = adapted_pair({}, None)
    apply_liger_kernel(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(3, 6, dtype=torch.bfloat16))
    for layer in (model.q, model.q.base_layer):
        assert projections.adapted(layer, torch.bfloat16) == "base is torch.float32, its input torch.bfloat16"
    assert not calls


def test_calls_that_no_operator_takes(calls):
    model, plain, x = adapted_pair({}, None), adapted_pair({}, None), torch.randn(3, 6)
    apply_liger_kernel(model)

    def autocast(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    for call in (
        autocast,
        lambda model: model(x[0]),
        lambda model: torch.func.vmap(model)(x[None]),
        lambda model: torch.func.jvp(model, (x,), (x,))[1],
        lambda model: [model.eval().q(x, adapter_names=["default", "__base__", "default"])],
    ):
        for ours, theirs in zip(call(model), call(plain), strict=True):
            assert torch.equal(ours, theirs)
        assert not calls
    model(x)
    assert taken(calls) == [2]


def test_hooked_layers_are_called(calls):
    model, x = adapted_pair({}, None), torch.randn(3, 6)
    apply_liger_kernel(model)
    expected = model(x)
    assert taken(calls) == [2]
    model.q.register_forward_hook(lambda module, given, result: -result)
    q, k = model(x)
    assert taken(calls) == [1, 1]
    torch.testing.assert_close((-q, k), expected)
    replaced, calls[:] = model.q.forward, []
    model.q.forward = lambda x: replaced(x) * 2
    q, k = model(x)
    torch.testing.assert_close((-q / 2, k), expected)
    assert taken(calls) == [1, 1]


def test_a_class_with_another_forward(monkeypatch, calls):
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: torch.zeros(len(x), self.out_features))
    model = adapted_pair({}, None)
    rows = apply_liger_kernel(model).rows
    assert {row.reason for row in rows if row.kind == "lora"} == {"its forward is not peft's"}
    assert not any(y.any() for y in model(torch.randn(3, 6))) and not calls


# ---- The report and the switch


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_report(name):
    model, report = build("after", name)
    rows = [row for row in report.rows if row.kind == "lora"]
    assert len(rows) == 7 * LAYERS and not report.left_alone
    assert {(row.type, row.replacement, row.reason) for row in rows} == {("Linear", "lora_linear", "")}
    assert apply_liger_kernel(model).rows == report.rows


def test_layers_that_were_adapted_after_patching_are_patched_by_a_second_call(calls):
    model, report = build("before")
    assert not lora_rows(report)
    assert lora_rows(apply_liger_kernel(model)) == {("lora_linear", ""): 7 * LAYERS}
    logits_of(model, tokens())
    assert taken(calls) == LAYERS * CALLS
    for layer in lora_layers(model):
        layer(torch.randn(2, layer.in_features))
    assert taken(calls) == [1] * 7 * LAYERS


def test_other_layers_of_peft_are_reported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.conv, self.linear = nn.Embedding(5, 4), nn.Conv2d(2, 2, 1), nn.Linear(4, 4)

    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=["embedding", "conv", "linear"]))
    rows = {row.module: (row.replacement, row.reason) for row in apply_liger_kernel(model).rows if row.kind == "lora"}
    assert rows == {
        "embedding": ("", "base is Embedding"),
        "conv": ("", "base is Conv2d"),
        "linear": ("lora_linear", ""),
    }


def test_dropout_runs_in_peft_only_in_training(calls):
    model, report = build("after", lora_dropout=0.25)
    plain, ids = build("", lora_dropout=0.25)[0], tokens()
    assert lora_rows(report) == {("lora_linear", "has dropout: peft's own forward in training"): 7 * LAYERS}
    assert {row.replacement for row in report.rows if row.kind == "mlp"} == {"swiglu"}
    assert_same_logits(logits_of(model.eval(), ids), logits_of(plain.eval(), ids), model, ids)
    assert calls
    calls.clear()
    model.train()
    losses = []
    for each in (model, plain):
        torch.manual_seed(5)
        losses.append(each.train()(input_ids=ids, labels=ids).loss.detach())
    assert not calls
    torch.testing.assert_close(*losses)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model(input_ids=ids, labels=ids)
    assert taken(calls) == LAYERS * CALLS


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_switch(order, calls):
    ids, expected = tokens(), step(build("")[0], tokens())
    model, report = build(order, switches={"lora": False})
    assert {row.kind for row in report.replaced} >= {"rope", "mlp", "norm", "loss"}
    assert lora_rows(report) == ({("", "lora is switched off"): 7 * LAYERS} if order == "after" else {})
    assert_same_step(model, ids, expected)
    assert not calls
    # One model's switch is not another's.
    step(build(order)[0], ids)
    assert taken(calls) == LAYERS * CALLS


@pytest.mark.parametrize("order", ["before", "after"])
def test_unpatch(order, calls):
    ids, plain = tokens(), build("")[0]
    expected = step(plain, ids)
    model, report = build(order)
    assert unpatch(model) == len(report.replaced) + 1  # the head has no row
    assert {type(layer) for layer in lora_layers(model)} == {LoraLinear}
    loss, gradients = step(model, ids)
    assert not calls and torch.equal(loss, expected[0])
    assert all(torch.equal(gradients[name], g) for name, g in expected[1].items())


def through_pickle(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("switches", [{}, {"lora": False}], ids=["", "off"])
def test_copies_stay_patched(copied, switches, calls):
    model, report = build("after", switches=switches)
    ids, expected = tokens(), step(model, tokens())
    assert taken(calls) == ([] if switches else LAYERS * CALLS)
    twin = copied(model)
    loss, gradients = step(twin, ids)
    assert taken(calls) == ([] if switches else LAYERS * CALLS)
    torch.testing.assert_close(loss, expected[0])
    assert gradients.keys() == expected[1].keys() and twin.state_dict().keys() == model.state_dict().keys()
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    if not switches:
        assert repr(twin.base_model.model.model.layers[0].mlp.gate_proj).startswith("lora.Linear(")
    assert unpatch(twin) == len(report.replaced) + 1
