"""apply_liger_kernel: the report, replaced and unreplaced modules, and use of the patched model afterwards."""

import copy
import functools
import gc
import inspect
import json
import pickle
import re
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as TF
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

import liger_ops.transformers as lt
from liger_ops.transformers import apply_liger_kernel, modules, probe, unpatch
from liger_ops.transformers.options import DEFAULTS, with_options
from liger_ops.transformers.patch import plan
from tests.support.checks import autocast_of_fake_gpus, output_of, run_forked
from tests.support.models.language_models import ARCHITECTURES, make, nodes, step, tokens
from tests.support.models.patched_models import FUSED, assert_same_step, patched, through_pickle

pytestmark = pytest.mark.usefixtures("as_large_models")


def test_the_report_prints_a_table_and_exports_data():
    model, report = patched("llama")
    assert json.loads(json.dumps(report.as_dict())) == {
        "model_type": "llama",
        "rows": [row._asdict() for row in report.rows],
        "coverage": report.coverage._asdict(),
        "options": {"switched_off": [], "memory_budget": None, "fp8": None},
    }
    assert {(r.kind, r.replacement) for r in report.rows} == {
        ("layer", "fused_add_rms_norm"), ("rope", "rope"), ("mlp", "swiglu"), ("norm", "rms_norm"),
        ("embedding", "embedding"), ("loss", FUSED),
    }  # fmt: skip
    lines = str(report).splitlines()
    assert lines[0] == "liger_ops on llama" and len(lines) == 9
    assert lines[-1] == "operators cover 100 % of the parameters and 100 % of their bytes"
    assert "LlamaRMSNorm" in str(report) and repr(report) == "<Report of llama: 13 replaced, 0 left alone>"


def test_a_second_call_changes_nothing():
    model, report = patched("llama")
    classes = [type(m) for m in model.modules()]
    assert apply_liger_kernel(model).rows == report.rows
    assert [type(m) for m in model.modules()] == classes


CHANGES = [
    ({}, {"memory_budget": 1 << 20}),
    ({"memory_budget": 1 << 20, "rope": False}, {"memory_budget": None}),
    ({}, {"rms_norm": False}),
    ({"swiglu": False, "lora": False}, {"swiglu": True}),
    ({"fp8": "rows"}, {"fp8": "tensor"}),
    ({"fp8": "rows", "embedding": False}, {"fp8": None, "fused_linear_cross_entropy": False}),
    ({"fp8": "rows", "fp8_filter": lambda module, name: "q_proj" in name}, {"fp8": "rows", "fp8_filter": None}),
]


COPIES = [lambda model: model, through_pickle, pytest.param(copy.deepcopy, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("copied", COPIES, ids=["itself", "pickle", "copy"])
@pytest.mark.parametrize("head", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["whole", "without head"])
@pytest.mark.parametrize("first, then", CHANGES, ids=lambda value: ", ".join(f"{k}={v}" for k, v in value.items())[:40])
def test_options_of_a_later_call_are_obeyed(first, then, head, copied):
    """Those that it does not give stay as they are."""

    def patched_with(model, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = apply_liger_kernel(model, **options)
        return sorted(report.rows), [type(module) for module in model.modules()]

    made = (lambda: make("llama")) if head else (lambda: make("llama").model)
    model, expected = made(), patched_with(made(), **first | then)
    patched_with(model, **first)
    model = copied(model)
    rows, classes = patched_with(model, **then)
    assert (rows, [cls.__name__ for cls in classes]) == (expected[0], [cls.__name__ for cls in expected[1]])
    assert patched_with(model, **then) == patched_with(model) == (rows, classes)
    if head:
        budget = (first | then).get("memory_budget")
        assert getattr(model.lm_head, "liger_memory_budget", budget) == budget
    unpatch(model)
    assert not any("liger_options" in vars(module) for module in model.modules())
    assert patched_with(model)[0] == patched_with(made())[0]


def test_a_bare_call_keeps_what_fp8_filter_left_out():
    for copied in (lambda model: model, through_pickle):
        model = make("llama")
        first = apply_liger_kernel(model, fp8="rows", fp8_filter=lambda module, name: "q_proj" in name)
        assert sorted(apply_liger_kernel(copied(model)).rows) == sorted(first.rows)


def test_options_cannot_change_below_a_wrapper_of_the_forward():
    model = make("llama")
    apply_liger_kernel(model)
    own = model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        return own(*args, **kwargs)

    model.forward = forward
    rows = apply_liger_kernel(model).rows
    with pytest.raises(
        RuntimeError, match="apply_liger_kernel: memory_budget must be given before something wraps .*model"
    ):
        apply_liger_kernel(model, memory_budget=1 << 20)
    assert apply_liger_kernel(model, memory_budget=None, rope=True).rows == rows


def test_patching_leaves_one_log_line(caplog):
    caplog.set_level("INFO", logger="liger_ops")
    model = make("llama")
    report = apply_liger_kernel(model)
    apply_liger_kernel(model)
    assert [record.message for record in caplog.records] == [str(report)]


@pytest.mark.parametrize("again", [False, True])
def test_a_resized_head_is_patched_too(again):
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model, swiglu=False)
    model.resize_token_embeddings(72, mean_resizing=False)
    assert type(model.lm_head) is nn.Linear
    if again:
        report = apply_liger_kernel(model, swiglu=False)
        assert report.rows[-1].replacement == FUSED and type(model.lm_head) is not nn.Linear
        assert {row.reason for row in report.left_alone} == {"swiglu is switched off"}
    ours = step(model, ids)
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    unpatch(model)
    assert type(model.lm_head) is nn.Linear
    assert_same_step(model, ids, ours)


def test_the_report_shows_a_replaced_head():
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model)
    linear, model.lm_head = model.lm_head, nn.Sequential(model.lm_head)
    assert apply_liger_kernel(model).rows[-1].reason == "its head is a Sequential"
    assert FUSED not in nodes(model(input_ids=ids, labels=ids).loss)
    model.lm_head = linear
    assert apply_liger_kernel(model).rows[-1].replacement == FUSED
    model.lm_head = nn.Linear(32, 64)
    model.lm_head.forward = lambda x: TF.linear(2 * x, model.lm_head.weight)
    assert FUSED not in nodes(model(input_ids=ids, labels=ids).loss)
    assert apply_liger_kernel(model).rows[-1].replacement == "cross_entropy"
    assert "cross_entropy" in nodes(model(input_ids=ids, labels=ids).loss)
    model = make("llama")
    model.lm_head.forward = lambda x: TF.linear(2 * x, model.lm_head.weight)
    plain = step(model, ids)
    report = apply_liger_kernel(model, cross_entropy=False)
    assert report.rows[-1].reason == "its head's forward was replaced"
    assert apply_liger_kernel(model, cross_entropy=True).rows[-1].replacement == "cross_entropy"
    assert_same_step(model, ids, plain)


@pytest.mark.parametrize("switch", ["rope", "rms_norm", "swiglu", "embedding"])
def test_switches(switch):
    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model, **{switch: False})
    assert {r.reason for r in report.left_alone} == {f"{switch} is switched off"}
    names = nodes(model(input_ids=ids, labels=ids).loss)
    expected = {"rope": "rope", "rms_norm": "rms_norm", "swiglu": "swiglu_linear", "embedding": "embedding"}
    assert expected.pop(switch) not in names and set(expected.values()) <= names
    assert_same_step(model, ids, plain)


def test_embeddings_without_an_operator_are_left_alone():
    model, ids = make("llama"), tokens()
    model.model.embed_tokens.scale_grad_by_freq = True
    plain = step(model, ids)
    (row,) = (r for r in apply_liger_kernel(model).left_alone if r.kind == "embedding")
    assert "scale_grad_by_freq" in row.reason and "embedding" not in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(model, ids, plain)


def test_cross_entropy_without_the_fused_loss():
    model, ids = make("gemma2"), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model, fused_linear_cross_entropy=False)
    assert report.rows[-1].replacement == "cross_entropy"
    out = model(input_ids=ids, labels=ids)
    assert out.logits.shape == (2, 12, 64)
    assert "cross_entropy" in nodes(out.loss) and FUSED not in nodes(out.loss)
    assert_same_step(model, ids, plain)
    unpatch(model)
    report = apply_liger_kernel(model, fused_linear_cross_entropy=False, cross_entropy=False)
    assert report.left_alone[-1].reason == "both losses are switched off"


@pytest.mark.parametrize("kept", [True, False])
def test_a_disabled_loss_is_not_called(kept):
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model, cross_entropy=kept)
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert ("cross_entropy" in nodes(model(input_ids=ids, labels=ids, skip_logits=False).loss)) == kept
    assert ("cross_entropy" in nodes(model.eval()(input_ids=ids, labels=ids).loss)) == kept


@pytest.mark.parametrize(
    "option, error, rule",
    [
        ({"flash": True}, TypeError, r"switches must be of rope, .* \(got flash\)"),
        ({"rope": "no"}, TypeError, r"rope must be True or False \(got 'no'\)"),
        ({"swiglu": None}, TypeError, r"swiglu must be True or False \(got None\)"),
        ({"memory_budget": "1GiB"}, TypeError, r"memory_budget must be a positive number of bytes .*\(got '1GiB'\)"),
        ({"memory_budget": True}, TypeError, r"memory_budget must be a positive number of bytes .*\(got True\)"),
        ({"memory_budget": -1}, ValueError, r"memory_budget must be a positive number of bytes .*\(got -1\)"),
        ({"memory_budget": 0}, ValueError, r"memory_budget must be a positive number of bytes .*\(got 0\)"),
    ],
    ids=str,
)
def test_wrong_options(option, error, rule):
    model = make("llama")
    name = "AutoLigerKernelForCausalLM"
    calls = {
        "apply_liger_kernel": [lambda: apply_liger_kernel(model, **option)],
        "apply_liger_kernel ": [lambda: apply_liger_kernel(LlamaForCausalLM, **option)],
        "apply_liger_kernel_to_llama": [lambda: lt.apply_liger_kernel_to_llama(model, **option)],
    }
    if "flash" not in option:  # which may be an option of from_pretrained
        calls[name] = [
            lambda: lt.AutoLigerKernelForCausalLM.from_config(model.config, **option),
            lambda: lt.AutoLigerKernelForCausalLM.from_pretrained("no/such-model", **option),
        ]
    for function, call in ((function.strip(), call) for function, found in calls.items() for call in found):
        with pytest.raises(error, match=f"^{function}: {rule}"):
            call()
    assert type(model) is LlamaForCausalLM


class Trainer:  # has what the check looks at in transformers' class
    def __init__(self, model):
        self.model = model

    def train(self):
        pass


@pytest.mark.parametrize(
    "given, got, advice",
    [
        (
            "gpt2",
            "'gpt2'",
            r"    model = AutoModelForCausalLM.from_pretrained\('gpt2'\)\n    apply_liger_kernel\(model\)",
        ),
        (Path("a/b"), r"PosixPath\('a/b'\)", r"    model = AutoModelForCausalLM.from_pretrained\('a/b'\)\n"),
        (LlamaConfig(), "LlamaConfig", r"    model = AutoModelForCausalLM.from_config\(config\)\n"),
        (LlamaConfig, "the class LlamaConfig", r"    model = AutoModelForCausalLM.from_config\(config\)\n"),
        (Trainer(nn.Linear(2, 2)), "Trainer", r".* before training starts:\n    apply_liger_kernel\(trainer.model\)"),
        (Trainer, "the class Trainer", r".* before training starts:\n    apply_liger_kernel\(trainer.model\)"),
        (AutoModelForCausalLM, "the class AutoModelForCausalLM", ".*AutoLigerKernelForCausalLM"),
        (None, "None", ""),
        (torch.ones(2), "Tensor", ""),
        (int, "the class int", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_arguments_that_are_no_model(given, got, advice):
    for function, argument in ((apply_liger_kernel, "model_or_class"), (lt.apply_liger_kernel_to_llama, "model")):
        with pytest.raises(TypeError) as raised:
            function(given)
        start = f"{function.__name__}: {argument} must be a torch.nn.Module or a class of them "
        assert re.match(rf"{start}\(got {got}\)([^\n]*\n)?{advice}", str(raised.value))
    with pytest.raises(TypeError, match=rf"^unpatch: model must be a torch.nn.Module \(got {got}\)$"):
        unpatch(given)


@pytest.mark.parametrize("cls", [LlamaForCausalLM, apply_liger_kernel(LlamaForCausalLM)])
def test_classes_cannot_be_unpatched(cls):
    with pytest.raises(
        TypeError, match=r"^unpatch: model must be a torch.nn.Module \(got the class LlamaForCausalLM\)$"
    ):
        unpatch(cls)


def test_keywords_that_nothing_takes(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    rule = r"^AutoLigerKernelForCausalLM: switches must be of rope, .* \(got rms_nrom\)$"
    for load in (
        lambda **options: lt.AutoLigerKernelForCausalLM.from_config(model.config, **options),
        lambda **options: lt.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, **options),
    ):
        with pytest.raises(TypeError, match=rule):
            load(rms_nrom=False)
        assert load(rms_norm=False, attn_implementation="eager").config._attn_implementation == "eager"


def test_two_models_in_one_process():
    one, other, ids = make("llama"), make("llama"), tokens()
    apply_liger_kernel(one)
    assert FUSED in nodes(one(input_ids=ids, labels=ids).loss)
    names = nodes(other(input_ids=ids, labels=ids).loss)
    assert not names & {"rope", "rms_norm", "swiglu_linear", FUSED, "cross_entropy"}
    assert type(other) is LlamaForCausalLM and nn.functional.cross_entropy is TF.cross_entropy
    assert_same_step(one, ids, step(other, ids))


def test_one_class_with_two_formulas():
    """Modules of a class share a patched class only if one operator fits them."""
    configs = [
        LlamaConfig(hidden_size=32, intermediate_size=24, hidden_act=act) for act in ("silu", "gelu_pytorch_tanh")
    ]
    mlps, x = [modeling_llama.LlamaMLP(config) for config in configs], torch.randn(3, 32)
    expected = [mlp(x) for mlp in mlps]
    assert [modules.patch_mlp(mlp, probe.identify_mlp(mlp)) for mlp in mlps] == ["swiglu", "geglu"]
    for mlp, y in zip(mlps, expected):
        torch.testing.assert_close(mlp(x), y)


def zeros_like_hidden(self, hidden_states, *args, **kwargs):
    return torch.zeros_like(hidden_states)


def reversed_rotation(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_whole(q, k, cos, -sin, unsqueeze_dim)


def labels_first_forward(self, labels=None, input_ids=None):
    return CausalLMOutput(loss=self.lm_head(self.model(input_ids).last_hidden_state).float().sum() * labels.sum())


@pytest.mark.parametrize(
    "owner, name, value",
    [
        (modeling_llama.LlamaAttention, "forward", lambda *args, **kwargs: (zeros_like_hidden(*args, **kwargs), None)),
        (modeling_llama.LlamaDecoderLayer, "forward", zeros_like_hidden),
        (modeling_llama, "apply_rotary_pos_emb", reversed_rotation),
        (modeling_llama, "eager_attention_forward", lambda module, q, *_, **__: (q.transpose(1, 2), None)),
        (LlamaForCausalLM, "forward", labels_first_forward),
    ],
    ids=["attention", "layer", "rotary", "function", "model"],
)
def test_later_models_use_monkey_patched_functions(owner, name, value, monkeypatch):
    ids, first, plain, later = tokens(), *(make("llama") for _ in range(3))
    apply_liger_kernel(first)
    before = step(first, ids)
    monkeypatch.setattr(owner, name, value)
    wanted = step(plain, ids)
    apply_liger_kernel(later)
    assert_same_step(later, ids, wanted)
    assert not torch.equal(before[0], wanted[0])


def test_a_patching_class_leaves_the_original_class_unchanged():
    Patching = apply_liger_kernel(LlamaForCausalLM, rope=False)
    config = make("llama").config
    model, ids = Patching(config), tokens()
    names = nodes(model(input_ids=ids, labels=ids).loss)
    assert {"rms_norm", FUSED} <= names and "rope" not in names and isinstance(model, LlamaForCausalLM)
    assert not nodes(LlamaForCausalLM(config)(input_ids=ids, labels=ids).loss) & {"rms_norm", FUSED}


def test_saved_and_loaded(tmp_path):
    model, ids = make("llama"), tokens()
    expected = model(input_ids=ids, labels=ids).loss
    model.save_pretrained(tmp_path)
    loaded = lt.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, swiglu=False)
    loaded.train()
    loss = loaded(input_ids=ids, labels=ids).loss
    assert FUSED in nodes(loss) and not nodes(loss) & {"swiglu", "swiglu_linear"}
    torch.testing.assert_close(loss, expected)
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert loaded.state_dict().keys() == model.state_dict().keys()
    fresh = lt.AutoLigerKernelForCausalLM.from_config(model.config, rope=False)
    assert "rope" not in nodes(fresh(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_copies_stay_patched(copied):
    model, ids = make("llama", tie_word_embeddings=True), tokens()
    apply_liger_kernel(model)
    twin = copied(copied(model))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight is not model.lm_head.weight
    assert_same_step(twin, ids, step(model, ids))
    assert FUSED in nodes(twin(input_ids=ids, labels=ids).loss)
    assert unpatch(twin) == unpatch(model) > 0
    assert type(twin) is LlamaForCausalLM and "liger_options" not in vars(twin)
    assert type(copied(twin)) is LlamaForCausalLM


@pytest.mark.thorough
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_pickles_are_patched_as_before(name):
    options = {"embedding": False, "memory_budget": 1 << 20}
    model = make(name)
    report = apply_liger_kernel(model, **options)
    loaded = through_pickle(model)
    classes = [type(module) for module in loaded.modules()]
    assert classes == [type(module) for module in model.modules()]
    assert apply_liger_kernel(loaded, **options).rows == report.rows
    assert loaded.lm_head.liger_memory_budget == 1 << 20


@pytest.mark.parametrize("copied", [copy.copy, through_pickle])
def test_a_single_patched_module_stays_patched(copied):
    model, x = make("llama"), torch.randn(2, 3, 32)
    apply_liger_kernel(model)
    for module in (model.model.norm, model.model.layers[0].mlp):
        twin = copied(module)
        assert type(twin) is type(module) and vars(twin).keys() == vars(module).keys()
        torch.testing.assert_close(twin(x), module(x))
    twin = copied(model.lm_head)
    torch.testing.assert_close(twin(x), model.lm_head(x))


@pytest.mark.thorough
def test_a_pickle_is_patched_in_another_process(tmp_path):
    model, ids = make("llama"), tokens()
    report = apply_liger_kernel(model)
    torch.save((model, ids), tmp_path / "model.pt")
    code = f"""
import torch
model, ids = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
loss = model(input_ids=ids, labels=ids).loss
print(loss.item())
import liger_ops.transformers
print(liger_ops.transformers.apply_liger_kernel(model).rows == {[tuple(row) for row in report.rows]!r})
from tests.support.models.language_models import nodes
print({FUSED!r} in nodes(loss))
"""
    loss, rows, fused = output_of(code).split()
    assert (rows, fused) == ("True", "True")
    assert float(loss) == pytest.approx(model(input_ids=ids, labels=ids).loss.item())


def test_a_pickle_with_cycles_of_modules():
    model, ids = make("llama"), tokens()
    report = apply_liger_kernel(model)
    expected = step(model, ids)
    layer = model.model.layers[0]
    layer.owners = [model]  # the pickle of the layer completes the model before the layer
    loaded = pickle.loads(pickle.dumps(layer))
    assert type(loaded) is type(layer)
    assert apply_liger_kernel(loaded.owners[0]).rows == report.rows
    assert_same_step(loaded.owners[0], ids, expected)


def test_a_module_that_cannot_be_patched_when_it_is_loaded():
    model, x = make("llama"), torch.randn(2, 3, 32)
    apply_liger_kernel(model)
    model.model.norm.forward = torch.relu
    warning = r"liger_ops: LlamaRMSNorm is loaded unpatched: its forward was replaced; call apply_liger_kernel\(model\)"
    with pytest.warns(RuntimeWarning, match=warning):
        loaded = through_pickle(model)
    assert type(loaded) is type(model) and type(loaded.model.norm) is modeling_llama.LlamaRMSNorm
    assert torch.equal(loaded.model.norm(x), x.relu())


def test_models_of_a_patching_class_are_pickled_with_the_original_class():
    config, ids = make("llama").config, tokens()
    for cls in (apply_liger_kernel(LlamaForCausalLM), apply_liger_kernel(apply_liger_kernel(LlamaForCausalLM))):
        model = cls(config)
        loss = model(input_ids=ids, labels=ids).loss
        assert FUSED in nodes(copy.deepcopy(model)(input_ids=ids, labels=ids).loss)
        unpatched = copy.deepcopy(model)
        unpatch(unpatched)
        assert type(copy.deepcopy(unpatched)) is cls
        for loaded, is_patched in ((through_pickle(model), True), (through_pickle(unpatched), False)):
            assert probe.original_class(type(loaded)) is LlamaForCausalLM
            assert (type(loaded) is not LlamaForCausalLM) == is_patched
            torch.testing.assert_close(loaded(input_ids=ids, labels=ids).loss, loss)


def test_functions_for_single_model_types():
    model = make("qwen3_moe")
    with pytest.raises(ValueError, match=r"apply_liger_kernel_to_llama: model must be of type llama \(got qwen3_moe\)"):
        lt.apply_liger_kernel_to_llama(model)
    assert lt.apply_liger_kernel_to_qwen3_moe(model, rope=False).replaced
    assert all(getattr(lt, name) for name in lt.__all__) and set(lt.__all__) <= set(dir(lt))
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(lt, "no_such_name")  # noqa: B009


# ---- Modules that are not recognised


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def test_an_unknown_model_is_left_alone_with_a_warning():
    model = Odd()
    with pytest.warns(RuntimeWarning, match="liger_ops: Odd is left as it is: its forward takes no labels"):
        report = apply_liger_kernel(model)
    assert not report.replaced and type(model) is Odd and unpatch(model) == 0


class LlamaRMSNorm(nn.Module):  # computes an RMSNorm only if `change` is the identity
    def __init__(self, change, size=16, epsilon=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = epsilon
        self.change = change

    def forward(self, x):
        return self.change(self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class LlamaMLP(nn.Module):
    def __init__(self, change, dropout=0.0):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 20), nn.Linear(8, 20), nn.Linear(20, 8)
        self.dropout = nn.Dropout(dropout)
        self.change = change

    def forward(self, x):
        return self.down_proj(self.dropout(self.change(TF.silu(self.gate_proj(x))) * self.up_proj(x)))


@pytest.mark.parametrize("cls, row", [(LlamaRMSNorm, 0), (LlamaMLP, 0)])
def test_modules_are_identified_by_value(cls, row):
    def rows_of(module):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return apply_liger_kernel(nn.Sequential(module)).rows

    assert rows_of(cls(lambda y: y))[row].replacement
    for change in (lambda y: y.clamp(max=7), lambda y: 2 * y, lambda y: y.abs()):
        assert rows_of(cls(change))[row].reason == "computes something else"


def test_dropout_and_replaced_forwards_are_respected():
    mlp, norm = LlamaMLP(lambda y: y, dropout=0.1), LlamaRMSNorm(lambda y: y)
    norm.forward = lambda x: x
    with pytest.warns(RuntimeWarning, match="left as it is"):
        rows = apply_liger_kernel(nn.Sequential(mlp, norm)).rows
    assert [r.reason for r in rows[:2]] == ["has dropout", "its forward was replaced"]


class Scale(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return self.scale * x


def test_an_activation_with_parameters_is_left_alone():
    learnt, kept = Scale(nn.Parameter(torch.ones(()))), Scale(nn.Buffer(torch.ones(())))
    with pytest.warns(RuntimeWarning, match="left as it is"):
        rows = apply_liger_kernel(nn.Sequential(LlamaMLP(learnt), LlamaMLP(kept), LlamaMLP(Scale(2)))).rows
    reasons = ["has parameters of its own", "has parameters of its own", "computes something else"]
    assert [row.reason for row in rows[:3]] == reasons


def test_epsilon_is_read_from_the_module_in_every_call():
    norm = LlamaRMSNorm(lambda y: y, epsilon=1e-2)
    x = 0.01 * torch.randn(3, 16)
    first = norm(x)
    assert apply_liger_kernel(norm).rows[0].replacement == "rms_norm"
    torch.testing.assert_close(norm(x), first)
    norm.eps = 1.0
    assert float(norm(x).abs().max()) < 0.2 * float(first.abs().max())


TORCH_NORMS = [
    nn.RMSNorm(16),
    nn.RMSNorm(16, eps=1e-3),
    nn.RMSNorm(16, elementwise_affine=False),
    nn.LayerNorm(16),
    nn.LayerNorm(16, bias=False),
    nn.LayerNorm(16, elementwise_affine=False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", TORCH_NORMS, ids=str)
def test_norms_of_torch(norm, dtype):
    # Small inputs, so that the default epsilon affects the result.
    norm, x = copy.deepcopy(norm).to(dtype), (1e-3 * torch.randn(3, 16)).to(dtype)
    expected = norm(x)
    assert apply_liger_kernel(norm).rows[0].replacement
    assert isinstance(norm, (nn.RMSNorm, nn.LayerNorm))
    torch.testing.assert_close(norm(x), expected)


def test_probing_prints_no_warning():
    """torch says once in a process that mixed dtypes make its RMSNorm slow."""
    code = "import torch, liger_ops.transformers as lt; print(lt.apply_liger_kernel(torch.nn.RMSNorm(16)).rows[0].replacement)"
    done = run_forked(code)
    assert (done.stdout, done.stderr) == ("rms_norm\n", "")


def test_norms_keep_their_dtype_in_autocast():
    """On GPUs, where autocast runs the operator in fp32."""
    norm = modeling_llama.LlamaRMSNorm(16)
    ours = copy.deepcopy(norm)
    assert apply_liger_kernel(ours).rows[0].replacement == "rms_norm"
    with autocast_of_fake_gpus():
        x, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 16), (16,)))
        norm.weight = ours.weight = nn.Parameter(weight, requires_grad=False)
        assert ours(x).dtype == norm(x).dtype == torch.bfloat16


def test_a_plan_changes_nothing():
    model = make("qwen3")
    attributes = [(type(module), dict(vars(module))) for module in model.modules()]
    steps = plan(model, with_options(DEFAULTS, {"swiglu": False}))
    assert attributes == [(type(module), dict(vars(module))) for module in model.modules()]
    assert {step.kind: step.reason for step in steps} == {
        "embedding": "", "norm": "", "layer": "", "rope": "", "mlp": "swiglu is switched off", "loss": "",
    }  # fmt: skip
    assert steps[-1].kind == "loss" and steps[-1].module is model


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_patched_modules_take_keywords(name):
    model, x = make(name), torch.randn(2, 3, 32)
    modules = [model.model.norm, model.model.layers[0].mlp, model.lm_head]
    keywords = [{next(iter(inspect.signature(module.forward).parameters)): x} for module in modules]
    plain = [module(**keyword) for module, keyword in zip(modules, keywords)]
    apply_liger_kernel(model)
    for module, keyword, expected in zip(modules, keywords, plain):
        torch.testing.assert_close(module(**keyword), expected)


# ---- Rotary functions


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def apply_rotary_whole(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_rotary_wrong_way(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_whole(q, k, cos, -sin, unsqueeze_dim)


def apply_rotary_positions(q, k, cos, sin):
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def test_rotary_functions_are_identified_by_value():
    assert probe.identify_rotary(apply_rotary_whole).kind == "half"
    assert probe.identify_rotary(apply_rotary_positions).layout == "SHD"
    with pytest.raises(probe.NotUnderstood, match="apply_rotary_wrong_way computes something else"):
        probe.identify_rotary(apply_rotary_wrong_way)


@pytest.mark.parametrize(
    "case", ["usual", "heads last", "few angles", "broadcast", "half precision", "two-dimensional"]
)
def test_replaced_rotary_functions_agree_with_the_original(case):
    original = apply_rotary_positions if case == "two-dimensional" else apply_rotary_whole
    ours = modules.rotary_function(probe.identify_rotary(original), original)
    options = {}
    shape = {"heads last": (2, 5, 3, 8), "two-dimensional": (5, 3, 8)}.get(case, (2, 3, 5, 8))
    if case == "heads last":
        options["unsqueeze_dim"] = 2
    q, k = torch.randn(shape), torch.randn(shape)
    angles = torch.randn(5, 8) if case == "two-dimensional" else torch.randn(2, 5, 8)
    if case == "broadcast":
        angles = angles[:, :1]  # one position for all tokens, which the operator does not support
    if case == "half precision":
        q, k = q.bfloat16(), k.bfloat16()
    for a, b in zip(
        ours(q, k, angles.cos(), angles.sin(), **options), original(q, k, angles.cos(), angles.sin(), **options)
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def test_a_patched_model_can_be_freed():
    model, _ = patched("llama")
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_transformers_is_imported_only_when_needed():
    code = "import sys, liger_ops.transformers, liger_ops.compat; print('transformers' in sys.modules)"
    assert output_of(code) == "False\n"
