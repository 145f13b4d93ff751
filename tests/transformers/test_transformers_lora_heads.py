"""Adapters of a model's head: the fused loss computes them, and the rest is left to peft."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from checks import count_graphs
from language_models import make, nodes, step, tokens, train
from lora_dropout import dropped
from lora_layers import (
    BASE,
    LAYERS,
    assert_as_accurate,
    build,
    lora_layers,
    results,
    with_adapters,
)
from patched_models import (
    FUSED,
    assert_as_found,
    assert_same_logits,
    assert_same_step,
    assert_training_is_as_accurate,
    logits_of,
    through_pickle,
)
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import fully_shard

from liger_ops.linear import adapters
from liger_ops.transformers import apply_liger_kernel, deferred, unpatch

pytestmark = pytest.mark.usefixtures("as_large_models")
HEAD = ["lm_head"]
ORDERS = pytest.mark.parametrize("order", ["before", "after"])


def adapt(order, *args, target_modules=HEAD, **options):
    return build(order, *args, target_modules=target_modules, **options)


def head_of(model):
    return model.get_output_embeddings()


@pytest.fixture
def losses(monkeypatch):
    """The ranks of the addend in each call of the fused loss: 0 without one."""
    found, function = [], deferred.F.fused_linear_cross_entropy

    def recorded(*args, low_rank_input=None, **options):
        found.append(0 if low_rank_input is None else low_rank_input.shape[-1])
        return function(*args, low_rank_input=low_rank_input, **options)

    monkeypatch.setattr(deferred.F, "fused_linear_cross_entropy", recorded)
    return found


def taken(losses):
    found = losses[:]
    losses.clear()
    return found


# ---- The same numbers


@ORDERS
@pytest.mark.parametrize(
    "dtype, adapter_dtype",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("targets", [HEAD, BASE + HEAD], ids=len)
def test_results_are_as_accurate_as_those_of_peft(dtype, adapter_dtype, targets, order, losses):
    (plain, _), ids = adapt("", "llama", dtype, adapter_dtype, target_modules=targets), tokens()
    theirs = results(plain, ids)
    assert not losses
    model, _ = adapt(order, "llama", dtype, adapter_dtype, target_modules=targets)
    ours = results(model, ids)
    assert taken(losses) == [4]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert_as_accurate(ours, theirs, plain, ids, dtype)


# A softcap, tied embeddings, scaled logits.
@ORDERS
@pytest.mark.parametrize("name", ["gemma2", "gemma", "cohere"])
def test_other_models(name, order, losses):
    ids, expected = tokens(), step(adapt("", name)[0], tokens())
    model, _ = adapt(order, name)
    assert_same_step(model, ids, expected)
    assert set(taken(losses)) == {4}


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_as_accurate_as_that_of_peft(dtype, order, losses):
    (plain, _), (model, _), ids, found = adapt("", dtype=dtype), adapt(order, dtype=dtype), tokens(), []
    for of in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(of, ids))
    assert taken(losses) == [4]
    assert_as_accurate(*found, plain, ids, torch.bfloat16)


class Masked(nn.Module):
    def forward(self, x):
        return dropped(x, 12345678901, 0.25) if self.training else x


@ORDERS
def test_dropout(order, losses, monkeypatch):
    function = adapters.seeds_for

    def fixed(dropout, device):
        return None if function(dropout, device) is None else torch.full((len(dropout),), 12345678901, device=device)

    monkeypatch.setattr(adapters, "seeds_for", fixed)
    plain, _ = adapt("", lora_dropout=0.25)
    head_of(plain).lora_dropout["default"], ids = Masked(), tokens()
    theirs = results(plain.train(), ids)
    model, _ = adapt(order, lora_dropout=0.25)
    ours = results(model.train(), ids)
    assert taken(losses) == [4]
    assert_as_accurate(ours, theirs, plain, ids, torch.float32)


@ORDERS
@pytest.mark.parametrize("learned", ["lora_A", "lora_B"])
def test_only_one_of_a_and_b_is_trained(order, learned, losses):
    ids, found = tokens(), []
    for which in ("", order):
        model, _ = adapt(which)
        for name, p in model.named_parameters():
            p.requires_grad_(learned in name)
        found.append((model, step(model, ids)))
    (_, expected), (model, _) = found
    assert len(expected[1]) == 1 and taken(losses) == [4]
    assert_same_step(model, ids, expected)


def test_a_trained_bias_and_a_trained_base(losses):
    ids, found = tokens(), []
    for patched in (False, True):
        model = make("phi")  # whose head has a bias
        model = with_adapters(model, target_modules=HEAD)
        base = head_of(model).base_layer
        assert base.bias is not None
        base.requires_grad_(True)
        if patched:
            apply_liger_kernel(model)
        found.append((model, step(model, ids)))
    (_, expected), (model, _) = found
    assert taken(losses) == [4] and len(expected[1]) == 4
    assert_same_step(model, ids, expected)


def test_twenty_steps_of_training_end_as_those_of_peft(losses):
    def start(seed):
        return with_adapters(make("llama", seed), init_lora_weights=True, target_modules=BASE + HEAD)

    def ours(model):
        apply_liger_kernel(model)
        assert not losses
        found = train(model, 20)
        assert taken(losses)[:20] == 20 * [4]
        return found

    assert_training_is_as_accurate(start, partial(train, steps=20), ours)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_compiled_models_have_one_graph(rate, losses):
    torch._dynamo.reset()
    (plain, _), (model, _) = adapt("", lora_dropout=rate), adapt("after", lora_dropout=rate)
    backend, graphs = count_graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in range(2):
        ids = tokens(seed=seed)
        ours = step(compiled, ids)
        assert len(graphs) == 1 and taken(losses) == [4]  # the recording is traced too
        if rate:
            continue
        assert_as_found(ours, plain, ids)
    torch._dynamo.reset()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("patched", ["before", "after", "sharded"])
@pytest.mark.usefixtures("process_group")
def test_fully_sharded_models(patched, alone, losses):
    """alone: the head's weights are gathered for its own call."""
    plain, ids = adapt("")[0], tokens()
    model, _ = adapt(patched)
    if alone:
        fully_shard(head_of(model))
    fully_shard(model)
    if patched == "sharded":
        report = apply_liger_kernel(model)
        reason = "peft's own forward unless its weights are gathered"
        assert row_of(report, "lm_head") == ("lora_linear", reason)
        assert row_of(report, "") == ("fused_linear_cross_entropy", "")
        assert apply_liger_kernel(model).rows == report.rows
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert taken(losses) == [4]
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    assert_as_found((loss, gradients), plain, ids)


# ---- What peft does with its layers


def second_adapter(model, **options):
    torch.manual_seed(2)
    given = {"r": 3, "lora_alpha": 5, "target_modules": HEAD, "init_lora_weights": False, **options}
    model.add_adapter("other", LoraConfig(**given))


def switch(model):
    second_adapter(model)
    model.set_adapter("other")


def two_adapters(model):
    second_adapter(model)
    model.base_model.set_adapter(["default", "other"])


def unmerge(model):
    model.merge_adapter()
    model.unmerge_adapter()


def merge(model):
    model.merge_adapter()


def disable(model):
    return model.disable_adapter()


def disable_merged(model):
    model.merge_adapter()
    return model.disable_adapter()


def set_scale(model):
    head_of(model).set_scale("default", 3.0)


def switch_to_dora(model):
    second_adapter(model, use_dora=True)
    model.set_adapter("other")


# With the ranks of the addend of a loss; None: the loss of logits.
OPERATIONS = [
    (unmerge, 4), (merge, 0), (disable, 0), (disable_merged, None), (switch, 3), (two_adapters, 7), (set_scale, 4),
    (switch_to_dora, None),
]  # fmt: skip


@ORDERS
@pytest.mark.parametrize("operation, ranks", OPERATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_operations_of_peft(operation, ranks, order, losses):
    ids, (model, _), (plain, _) = tokens(), adapt(order), adapt("")

    def after_operation(model):
        model(input_ids=ids, labels=ids)  # with the state before the operation
        losses.clear()
        context = operation(model) or contextlib.nullcontext()
        model.train()
        # Something must take a gradient if no adapter does.
        model.get_input_embeddings().weight.requires_grad_()
        return context

    with after_operation(model):
        found = step(model, ids)
        assert taken(losses) == ([] if ranks is None else [ranks])
        ours = logits_of(model.eval(), ids)
    with after_operation(plain):
        assert_as_found(found, plain, ids)
        assert_same_logits(ours, logits_of(plain.eval(), ids), plain, ids)
    assert model.state_dict().keys() == plain.state_dict().keys()


@ORDERS
def test_an_adapter_for_each_row_is_left_to_peft(order, losses):
    ids, found = tokens(), []
    for model, _ in (adapt(""), adapt(order)):
        second_adapter(model)
        found.append(model.eval()(input_ids=ids, labels=ids, adapter_names=["other", "__base__"]).loss)
    assert not taken(losses)
    torch.testing.assert_close(*found)


@ORDERS
def test_hooked_heads_compute_logits(order, losses):
    ids, found = tokens(), []
    for model, _ in (adapt(""), adapt(order)):
        head_of(model).register_forward_hook(lambda module, given, result: 2 * result)
        found.append((model, step(model, ids)))
    (_, expected), (model, _) = found
    assert not taken(losses)
    assert_same_step(model, ids, expected)


@ORDERS
def test_merged_for_good(order, losses):
    """The head is a linear layer again, whose loss is fused."""
    ids, found = tokens(), []
    for model, _ in (adapt(""), adapt(order)):
        model(input_ids=ids, labels=ids)
        losses.clear()
        merged = model.merge_and_unload().train().requires_grad_()
        assert not lora_layers(merged)
        found.append(step(merged, ids))
    assert taken(losses) == [0]
    assert_same_step(merged, ids, found[0])


def test_logits_beside_the_loss(losses):
    (plain, _), (model, _), ids = adapt(""), adapt("after"), tokens()
    expected = plain(input_ids=ids, labels=ids)
    assert model(input_ids=ids, labels=ids).logits is None and taken(losses) == [4]
    found = model(input_ids=ids, labels=ids, skip_logits=False)
    assert not taken(losses)
    torch.testing.assert_close(found.loss, expected.loss)
    assert_same_logits(found.logits.detach(), expected.logits.detach(), plain, ids)


# ---- The report


def row_of(report, module):
    return next((row.replacement, row.reason) for row in report.rows if row.module == module)


def test_the_report():
    model, report = adapt("after")
    assert row_of(report, "lm_head") == ("lora_linear", "") and row_of(report, "") == ("fused_linear_cross_entropy", "")
    assert apply_liger_kernel(model).rows == report.rows
    assert unpatch(model) == len(report.replaced)  # the head has the row of its adapters
    assert not any(hasattr(type(module), "liger_original") for module in model.modules())


@pytest.mark.parametrize("steps", [0, 1])
def test_the_report_of_a_head_that_was_adapted_after_patching(steps, losses):
    model, _ = adapt("before")
    for _ in range(steps):
        step(model, tokens())
    report = apply_liger_kernel(model)
    assert row_of(report, "lm_head") == ("lora_linear", "") and row_of(report, "") == ("fused_linear_cross_entropy", "")
    assert apply_liger_kernel(model).rows == report.rows
    step(model, tokens())
    assert taken(losses) == [4] * (steps + 1)


REASONS = [
    ({"use_dora": True}, {}, "is the variant Dora"),
    ({"lora_bias": True}, {}, "its adapter has a bias"),
    ({}, {"lora": False}, "lora is switched off"),
]


@pytest.mark.parametrize("options, switches, reason", REASONS)
def test_reasons(options, switches, reason, losses):
    ids, expected = tokens(), step(adapt("", **options)[0], tokens())
    model, report = adapt("after", switches=switches, **options)
    assert row_of(report, "lm_head") == ("", reason)
    assert row_of(report, "") == ("", f"its head is left to peft: {reason}")
    assert_same_step(model, ids, expected)
    assert not taken(losses)


SAVED = {"modules_to_save": {"modules_to_save": HEAD}, "tokens": {"trainable_token_indices": {"lm_head": [3, 5, 9]}}}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("options", SAVED.values(), ids=SAVED)
def test_a_trained_copy_of_the_head(options, order, losses):
    """modules_to_save, and trainable tokens."""
    ids, options = tokens(), {"target_modules": ["q_proj"], **options}
    expected = step(build("", **options)[0], ids)
    assert any("lm_head" in name for name in expected[1])
    model, report = build(order, **options)
    assert row_of(report, "") == (FUSED, "")
    if order == "after":
        assert apply_liger_kernel(model).rows == report.rows
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(model, ids, expected)
    with model.disable_adapter():
        disabled = step_of_base(model, ids)
    twin = through_pickle(model)
    assert FUSED in nodes(twin(input_ids=ids, labels=ids).loss)
    unpatch(model)
    assert_same_step(model, ids, expected)
    with model.disable_adapter():
        torch.testing.assert_close(step_of_base(model, ids), disabled)


def step_of_base(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss


def test_a_saved_copy_is_no_linear_layer_in_fp8():
    options = {"target_modules": ["q_proj"], "modules_to_save": HEAD}
    model, report = build("after", switches={"fp8": "rows"}, **options)
    assert not [row for row in report.rows if row.kind == "linear" and "lm_head" in row.module]


def test_the_inner_model_of_peft():
    model, _ = build("", target_modules=["q_proj"])
    report = apply_liger_kernel(model.base_model)
    assert report.rows[-1].replacement == FUSED and report.model_type == "llama"
    assert apply_liger_kernel(model).rows == report.rows and unpatch(model.base_model)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_copies_stay_patched(copied, losses):
    model, report = adapt("after", target_modules=BASE + HEAD)
    ids, expected = tokens(), step(model, tokens())
    twin = copied(copied(model))
    losses.clear()
    loss, gradients = step(twin, ids)
    assert taken(losses) == [4]
    torch.testing.assert_close(loss, expected[0])
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert unpatch(twin) == len(report.replaced) == 7 * LAYERS + 14


def test_gradient_checkpointing(losses):
    plain, ids = adapt("")[0], tokens()
    expected = step(plain, ids)
    model, _ = adapt("after")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    assert_same_step(model, ids, expected)
    assert set(taken(losses)) == {4}


def test_same_logits_in_evaluation():
    (plain, _), (model, _), ids = adapt(""), adapt("after"), tokens()
    assert_same_logits(logits_of(model.eval(), ids), logits_of(plain.eval(), ids), model, ids)
