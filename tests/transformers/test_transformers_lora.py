"""Models with adapters of peft, of every kind of peft_models.py: the same numbers, and the same operations of peft.

order: "" for peft's own code, or when the model is patched: before or after it gets its adapters."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import fully_shard

from liger_ops.linear import adapters
from liger_ops.transformers import apply_liger_kernel, unpatch
from tests.support.checks import count_graphs
from tests.support.models.language_models import make, step, tokens, train
from tests.support.models.lora_bases import with_bases
from tests.support.models.lora_dropout import dropped
from tests.support.models.lora_layers import (
    BASE,
    CALLS,
    LAYERS,
    assert_as_accurate,
    build,
    record_calls,
    results,
    with_adapters,
)
from tests.support.models.lora_layers import lora_rows as rows_of
from tests.support.models.patched_models import (
    assert_as_found,
    assert_same_logits,
    assert_same_step,
    assert_training_is_as_accurate,
    logits_of,
    through_pickle,
)
from tests.support.models.peft_models import (
    HEAD,
    KINDS,
    OPERATIONS,
    adapted_layers,
    gpt2,
    record,
    second_adapter,
    two_adapters,
)
from tests.support.pairs import pairwise

pytestmark = pytest.mark.usefixtures("as_large_models")
ORDERS = pytest.mark.parametrize("order", ["before", "after"])
LAYERS_AND_HEAD = pytest.mark.parametrize("kind", ["layers", "head"])
SEED, RATE = 12345678901, 0.25
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.fixture
def taken(kind, monkeypatch):
    return record(monkeypatch, kind)


# ---- The same numbers


class Masked(nn.Module):
    """Peft's dropout with the masks of the operator."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def forward(self, x):
        return dropped(x, self.seed, RATE) if self.training else x


def with_known_masks(monkeypatch, plain):
    """A seed for each layer of `plain` and its patched twin, the same in every step. They are called in the order of the
    model."""
    layers, function, given = adapted_layers(plain), adapters.seeds_for, [0]
    for i, layer in enumerate(layers):
        layer.lora_dropout["default"] = Masked(i * SEED)

    def counted(dropout, device):
        if function(dropout, device) is None:
            return None
        first = given[0] % len(layers)
        given[0] += len(dropout)
        return torch.arange(first, first + len(dropout), device=device) * SEED

    monkeypatch.setattr(adapters, "seeds_for", counted)


@pairwise(
    kind=["layers", "biases", "head", "dropout", "dropout of the head", "gptq and dropout", "hqq", "conv1d", "hooked"],
    dtypes=DTYPES,
    order=["before", "after"],
    autocasts=[False, True],
)
def test_results_are_as_accurate_as_those_of_peft(kind, dtypes, order, autocasts, taken, monkeypatch):
    plain, ids = KINDS[kind].build("", dtype=dtypes[0], adapter_dtype=dtypes[1])[0], tokens()
    if "dropout" in kind:
        with_known_masks(monkeypatch, plain)
    model, _ = KINDS[kind].build(order, dtype=dtypes[0], adapter_dtype=dtypes[1])
    found = []
    for of in (plain, model):
        # Of codes peft knows no dtype.
        assert kind not in ("layers", "head") or {p.dtype for p in of.parameters() if p.requires_grad} == {dtypes[1]}
        taken()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            found.append(results(of, ids))
        # The logits, and a step.
        times = 0 if of is plain else 1 if "head" in kind else 2
        assert taken() == times * KINDS[kind].calls
    theirs, ours = found
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
    assert_as_accurate(ours, theirs, plain, ids, torch.bfloat16 if autocasts else dtypes[0])


MODELS = [
    *(("layers", "llama", targets, LAYERS * CALLS) for targets in (BASE, BASE + HEAD)),
    *(("layers", name, BASE, LAYERS * CALLS) for name in ("qwen2", "gemma", "qwen3")),
    ("layers", "phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], LAYERS * [1, 1, 1, 1]),
    ("layers", "mixtral", BASE[:4], LAYERS * CALLS[:2]),
    # A softcap, tied embeddings, scaled logits.
    *(("head", name, HEAD, [4]) for name in ("gemma2", "gemma", "cohere")),
]


@ORDERS
@pytest.mark.parametrize("kind, name, targets, calls", MODELS, ids=str)
def test_other_models(kind, name, targets, calls, order, taken):
    ids, plain = tokens(), step(build("", name, target_modules=targets)[0], tokens())
    model, _ = build(order, name, target_modules=targets)
    assert_same_step(model, ids, plain)
    taken()
    step(model, ids)
    assert taken() == calls


@ORDERS
@pytest.mark.parametrize("kind", ["int8", "awq"])
def test_steps_are_those_of_peft(kind, order, taken):
    """In evaluation, bitsandbytes rounds activations."""
    ids, expected = tokens(), step(KINDS[kind].build("")[0].train(), tokens())
    model = KINDS[kind].build(order)[0].train()
    assert_same_step(model, ids, expected)
    taken()
    step(model, ids)
    assert taken() == KINDS[kind].calls


@ORDERS
def test_projections_without_adapters_join_the_call(order, monkeypatch):
    options = {"target_modules": ["q_proj", "v_proj", "up_proj"], "rank_pattern": {"v_proj": 7}, "use_rslora": True}
    ids, expected = tokens(), step(build("", **options)[0], tokens())
    model, _ = build(order, **options)
    assert_same_step(model, ids, expected)
    calls = record_calls(monkeypatch)
    step(model, ids)
    assert [(call.projections, call.adapters) for call in calls] == LAYERS * [(3, 2), (2, 1)]


@LAYERS_AND_HEAD
@pytest.mark.parametrize("learned, order", [("lora_A", "before"), ("lora_B", "after")])
def test_only_one_of_a_and_b_is_trained(learned, order, kind, taken):
    ids, found = tokens(), []
    for which in ("", order):
        model, _ = KINDS[kind].build(which)
        for name, p in model.named_parameters():
            p.requires_grad_(learned in name)
        found.append(step(model, ids))
    assert all(learned in name for name in found[0][1]) and taken()
    assert_same_step(model, ids, found[0])


CHECKPOINTED = [kind for kind in KINDS if kind not in ("awq", "aqlm", "te", "eetq", "hqq", "linear", "hooked")]


@pairwise(kind=CHECKPOINTED, reentrant=[False, True], order=["before", "after"])
def test_gradient_checkpointing(kind, reentrant, order, taken):
    """Which draws the same masks again."""

    def of_seed():
        torch.manual_seed(5)
        return step(model, ids)

    model, ids = KINDS[kind].build(order)[0].train(), tokens()
    expected = of_seed()
    # In four bits a forward without gradients is bitsandbytes' own, which rounds otherwise.
    model.gradient_checkpointing_enable({"use_reentrant": reentrant and kind != "four bits"})
    model.enable_input_require_grads()
    taken()
    loss, gradients = of_seed()
    # A checkpoint may end before the last projection, which saves nothing that another needs.
    assert len(taken()) >= (1 if "head" in kind else 2 * len(KINDS[kind].calls) - LAYERS)
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=1e-6)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)
    assert "dropout" not in kind or not torch.equal(step(model, ids)[0], loss)


@pytest.mark.parametrize(
    "kind",
    [
        "dropout",
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in ("dropout of the head", "gptq", "layers", "hooked", "four bits")
        ),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_models_have_one_graph(kind, taken):
    # One layer in four bits: dynamo takes half a minute for each.
    options, layers = ({"layers": 1}, 1) if kind == "four bits" else ({}, LAYERS)
    model, _ = KINDS[kind].build("after", **options)
    backend, graphs = count_graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=kind not in ("gptq", "hooked", "four bits"))
    for seed in range(1 if options else 2):
        ids, found = tokens(seed=seed), []
        for of in (model, compiled):
            torch.manual_seed(5)
            taken()
            found.append(step(of, ids))
        # The recording is traced too.
        assert graphs and taken() == KINDS[kind].calls[: None if "head" in kind else layers * len(CALLS)]
        assert len(graphs) == 1 or kind in ("gptq", "hooked", "four bits")
        (expected, others), (loss, gradients) = found
        torch.testing.assert_close(loss, expected)
        for name, gradient in others.items():
            torch.testing.assert_close(gradients[f"_orig_mod.{name}"], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, sharded", [("layers", "layers"), ("head", "head"), ("head", "")])
@pytest.mark.parametrize("patched", ["before", "after", "sharded"])
@pytest.mark.usefixtures("process_group")
def test_fully_sharded_models(patched, kind, sharded, taken):
    """A head that is sharded alone gathers its weights for its own call."""
    plain, ids = KINDS[kind].build("")[0], tokens()
    model, _ = KINDS[kind].build(patched)
    parts = {"layers": model.base_model.model.model.layers, "head": [model.get_output_embeddings()]}
    for part in parts.get(sharded, ()):
        fully_shard(part)
    fully_shard(model)
    if patched == "sharded":
        report = apply_liger_kernel(model)
        reason = "peft's own forward unless its weights are gathered"
        assert rows_of(report) == {("lora_linear", reason): len(adapted_layers(model))}
        assert kind == "layers" or report.rows[-1][3:] == ("fused_linear_cross_entropy", "")
        assert apply_liger_kernel(model).rows == report.rows
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert taken() == KINDS[kind].calls
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    assert_as_found((loss, gradients), plain, ids)


def test_twenty_steps_of_training_end_as_those_of_peft(monkeypatch):
    def start(seed):
        return with_adapters(make("llama", seed), init_lora_weights=True, target_modules=BASE + HEAD)

    def ours(model):
        apply_liger_kernel(model)
        layers, head = record(monkeypatch, "layers"), record(monkeypatch, "head")
        found = train(model, 20)
        # In evaluation the head returns logits.
        assert layers() == [*(21 * LAYERS * CALLS), 1] and head() == 20 * [4]
        return found

    exact, _ = assert_training_is_as_accurate(start, partial(train, steps=20), ours)
    # The same eight batches.
    assert float(exact["losses"][-8:].mean()) < float(exact["losses"][4:12].mean())


# ---- What peft does with its layers


@pytest.mark.parametrize("kind, operation, calls", OPERATIONS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_operations_of_peft(kind, operation, calls, taken):
    """Each second model is patched before it gets its adapters."""
    order = ("before", "after")[len(operation.__name__) % 2] if kind in ("layers", "head") else "after"
    ids, (plain, _), (model, _) = tokens(), KINDS[kind].build(""), KINDS[kind].build(order)

    def after_operation(model):
        model.train()(input_ids=ids, labels=ids)  # with the state before the operation
        taken()
        context = operation(model) or contextlib.nullcontext()
        # Something must take a gradient if no adapter does.
        model.train().get_input_embeddings().weight.requires_grad_()
        return context

    with after_operation(model):
        found = step(model, ids)
        assert taken() == calls
        ours = logits_of(model.train(kind == "int8"), ids)
    with after_operation(plain):
        assert_as_found(found, plain, ids)
        assert_same_logits(ours, logits_of(plain.train(kind == "int8"), ids), plain, ids)
    theirs, own = plain.state_dict(), model.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)


def test_two_adapters_are_one_call(monkeypatch):
    model, _ = build("after")
    two_adapters(model)
    calls = record_calls(monkeypatch)
    logits_of(model, tokens())
    assert [call.adapters for call in calls] == LAYERS * [2 * n for n in CALLS]


@ORDERS
@LAYERS_AND_HEAD
def test_an_adapter_for_each_row_is_left_to_peft(kind, order, taken):
    found = []
    for model in (KINDS[kind].build("")[0], KINDS[kind].build(order)[0]):
        second_adapter(model)
        with torch.no_grad():
            found.append(model.eval()(tokens(), labels=tokens(), adapter_names=["other", "__base__"]))
    assert not taken()
    torch.testing.assert_close(found[1].loss, found[0].loss)
    torch.testing.assert_close(found[1].logits, found[0].logits)


@ORDERS
@LAYERS_AND_HEAD
def test_merged_for_good(kind, order, taken):
    """The head is a linear layer again, whose loss is fused."""
    ids, found = tokens(), []
    for model in (KINDS[kind].build("")[0], KINDS[kind].build(order)[0]):
        merged = model.merge_and_unload().train().requires_grad_()
        assert not adapted_layers(merged)
        found.append(step(merged, ids))
    assert taken() == ([0] if kind == "head" else [])
    assert_same_step(merged, ids, found[0])


@pytest.mark.parametrize(
    "kind, order",
    [("layers", "before"), ("layers", "after"), ("int8", "after"), ("gptq", "after"), ("conv1d", "after")],
)
def test_saved_and_loaded(kind, order, tmp_path, taken):
    (plain, _), (model, _), ids = KINDS[kind].build(""), KINDS[kind].build(order), tokens()
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "theirs")
    files = [(tmp_path / who / "adapter_model.safetensors").read_bytes() for who in ("ours", "theirs")]
    assert files[0] == files[1]
    if kind == "gptq":  # the stand-in is not saved
        return
    base = gpt2() if kind == "conv1d" else with_bases(make("llama"), kind) if kind == "int8" else make("llama")
    if order == "before":
        apply_liger_kernel(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours")
    if order == "after":
        apply_liger_kernel(loaded)
    logits = logits_of(loaded.train(), ids)
    assert taken() == KINDS[kind].calls
    assert_same_logits(logits, logits_of(plain.train(), ids), loaded, ids)


@ORDERS
@pytest.mark.parametrize("kind", ["layers"])
def test_modules_to_save(order, kind, taken):
    options = {"modules_to_save": ["lm_head", "norm"]}
    ids, expected = tokens(), step(build("", **options)[0], tokens())
    assert any("lm_head" in name for name in expected[1])
    model, _ = build(order, **options)
    assert_same_step(model, ids, expected)
    assert set(taken()) == set(CALLS)


# ---- Reports, copies and the way back


@pytest.mark.parametrize("order, steps", [("before", 0), ("before", 1), ("after", 0)])
@LAYERS_AND_HEAD
def test_the_report(kind, order, steps, taken):
    """Layers that are adapted after patching are patched by a second call."""
    model, report = KINDS[kind].build(order)
    count = len(adapted_layers(model))
    for _ in range(steps):
        step(model, tokens())
    taken()
    assert rows_of(report) == ({("lora_linear", ""): count} if order == "after" else {})
    report = apply_liger_kernel(model)
    assert rows_of(report) == {("lora_linear", ""): count} and not report.left_alone
    assert report.rows[-1][3:] == ("fused_linear_cross_entropy", "")
    assert apply_liger_kernel(model).rows == report.rows
    step(model, tokens())
    assert taken() == KINDS[kind].calls


@ORDERS
@LAYERS_AND_HEAD
def test_unpatch(kind, order, taken):
    ids, (plain, _), (model, report) = tokens(), KINDS[kind].build(""), KINDS[kind].build(order)
    expected = step(plain, ids)
    # The head has no row, or that of its adapters.
    assert unpatch(model) == len(report.replaced) + (kind == "layers" or order == "before")
    assert not any(hasattr(type(module), "liger_original") for module in model.modules())
    loss, gradients = step(model, ids)
    assert not taken() and torch.equal(loss, expected[0])
    assert all(torch.equal(gradients[name], g) for name, g in expected[1].items())


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("kind, switches", [("layers", {}), ("layers", {"lora": False}), ("head", {})], ids=str)
def test_copies_stay_patched(copied, switches, kind, taken):
    model, report = KINDS[kind].build("after", switches=switches)
    ids, expected = tokens(), step(model, tokens())
    twin = copied(copied(model))
    taken()
    loss, gradients = step(twin, ids)
    assert taken() == ([] if switches else KINDS[kind].calls)
    torch.testing.assert_close(loss, expected[0])
    assert gradients.keys() == expected[1].keys() and twin.state_dict().keys() == model.state_dict().keys()
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    if kind == "layers" and not switches:
        assert repr(twin.base_model.model.model.layers[0].mlp.gate_proj).startswith("lora.Linear(")
    assert unpatch(twin) == len(report.replaced) + (kind == "layers")
