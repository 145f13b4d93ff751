"""LoRA layers of peft in patched models: the same numbers, and the same operations of peft."""

import contextlib
from functools import partial

import pytest
import torch
from checks import count_graphs
from language_models import make, step, tokens, train
from lora_layers import (
    BASE,
    CALLS,
    LAYERS,
    assert_as_accurate,
    build,
    lora_layers,
    lora_rows,
    record_calls,
    results,
    taken,
    with_adapters,
)
from patched_models import (
    assert_as_exact,
    assert_as_found,
    assert_same_logits,
    assert_same_step,
    assert_training_is_as_accurate,
    logits_of,
)
from peft import LoraConfig, PeftModel
from torch.distributed.fsdp import fully_shard

from liger_ops.transformers import apply_liger_kernel

pytestmark = pytest.mark.usefixtures("as_large_models")


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


# ---- The same numbers


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_as_accurate_as_that_of_peft(dtype, order, calls):
    (plain, _), (model, _), ids = build("", dtype=dtype), build(order, dtype=dtype), tokens()
    calls.clear()
    found = []
    for of in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(of, ids))
    assert taken(calls) == 2 * LAYERS * CALLS
    for name in found[1]:
        assert found[0][name].dtype == found[1][name].dtype
    assert_as_accurate(*found, plain, ids, torch.bfloat16)


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
    def start(seed):
        return with_adapters(make("llama", seed), init_lora_weights=True)

    def ours(model):
        apply_liger_kernel(model)
        assert not calls
        found = train(model, 20)
        assert taken(calls) == 21 * LAYERS * CALLS
        return found

    exact, _ = assert_training_is_as_accurate(start, partial(train, steps=20), ours)
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
        ours = step(compiled, ids)
        # The recording is traced too.
        assert len(graphs) == 1 and taken(calls) == LAYERS * CALLS
        assert_as_found(ours, plain, ids)
    torch._dynamo.reset()


@pytest.mark.parametrize("patched", ["before", "after", "sharded"])
@pytest.mark.usefixtures("process_group")
def test_fully_sharded_models(patched, calls):
    plain, ids = build("")[0], tokens()
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
    assert_as_found((loss, gradients), plain, ids)


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
