"""liger_ops.transformers: models of many architectures train as they did, whatever wraps them."""

import collections
import copy
import dataclasses
import gc
import inspect
import io
import json
import textwrap
import threading
import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
from language_models import ARCHITECTURES, clone, make, nodes, step, tokens, train
from support import count_graphs, output_of
from torch import nn
from torch.nn import functional as TF
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

import liger_ops.transformers as lt
from liger_ops.transformers import apply_liger_kernel, probe, unpatch
from liger_ops.transformers.deferred import DeferredLogits

FUSED = "fused_linear_cross_entropy"

pytestmark = pytest.mark.usefixtures("as_large_models")


def patched(name, **options):
    model = make(name, **options)
    report = apply_liger_kernel(model)
    return model, report


def assert_same_step(a, b, tolerance=1e-4):
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6)
    assert a[1].keys() == b[1].keys()
    largest = max(float(g.abs().max()) for g in b[1].values())
    for name, gradient in a[1].items():
        assert float((gradient - b[1][name]).abs().max()) <= tolerance * largest, name


# ---- Convergence


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_training_converges_to_the_same(name, dtype):
    """Against the same training in a wider dtype, ours errs as unpatched training does in its own: in the geometric mean
    over a few trainings, because rounding grows exponentially, and a rare training errs thirty times as much.

    The logarithm of the ratio of both errors has a standard deviation of up to 0.56 (twelve trainings of gemma3_text,
    whose mean ratios are 0.94 to 1.04), so the mean of four has 0.28. Five of these are a factor of 4."""
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    errors = {who: collections.defaultdict(lambda: 1.0) for who in ("ours", "eager")}
    trainings = 4
    for seed in range(trainings):
        start = make(name, seed)
        exact, eager = train(clone(start, wide)), train(clone(start, dtype))
        model = clone(start, dtype)
        report = apply_liger_kernel(model)
        assert {"norm", "loss"} <= {row.kind for row in report.replaced} and not report.left_alone
        ours = train(model)
        for who, result in (("ours", ours), ("eager", eager)):
            for key, wanted in exact.items():
                error = float((result[key] - wanted).pow(2).mean().sqrt()) / float(wanted.abs().max())
                errors[who][key] *= error ** (1 / trainings)
    for key, error in errors["ours"].items():
        assert error <= 4 * errors["eager"][key] + torch.finfo(dtype).eps, key
    assert float(ours["losses"][-8:].mean()) < float(ours["losses"][:8].mean()) - 0.05


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_step_and_generation(name):
    model, ids = make(name), tokens()
    plain = step(model, ids)
    model.eval()
    text = model.generate(ids[:1], max_new_tokens=6, do_sample=False)
    logits = model(input_ids=ids).logits
    report = apply_liger_kernel(model)
    model.train()
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(step(model, ids), plain)
    model.eval()
    assert torch.equal(model.generate(ids[:1], max_new_tokens=6, do_sample=False), text)
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert unpatch(model) == len(report.replaced) + 1  # and the head
    model.train()
    after = step(model, ids)
    assert torch.equal(after[0], plain[0]) and all(torch.equal(g, plain[1][n]) for n, g in after[1].items())


@pytest.mark.parametrize("weights, dtype", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_dtypes_under_autocast_stay(weights, dtype):
    model, ids = make("qwen3", dtype=weights), tokens()
    seen = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, i, o: seen.append(o.dtype) if isinstance(o, torch.Tensor) else None)
    model.lm_head._forward_hooks.clear()
    with torch.autocast("cpu", dtype):
        expected = model(input_ids=ids, labels=ids).loss
        before = list(seen)
        apply_liger_kernel(model)
        seen.clear()
        loss = model(input_ids=ids, labels=ids).loss
    # Patched MLPs call their activation no more.
    activations = sum(type(m).__name__.startswith("SiLU") for m in model.modules())
    assert seen and len(seen) == len(before) - activations and set(seen) == set(before)
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    loss.backward()


# ---- The report, and its order


def test_the_report_is_a_table_and_data():
    model, report = patched("llama")
    assert json.loads(json.dumps(report.as_dict()))["model_type"] == "llama"
    assert {(r.kind, r.replacement) for r in report.rows} == {
        ("layer", "fused_add_rms_norm"), ("rope", "rope"), ("mlp", "swiglu"), ("norm", "rms_norm"),
        ("embedding", "embedding"), ("loss", FUSED),
    }  # fmt: skip
    lines = str(report).splitlines()
    assert lines[0] == "liger_ops on llama" and len(lines) == 8
    assert "LlamaRMSNorm" in str(report) and repr(report) == "<Report of llama: 13 replaced, 0 left alone>"


def test_a_second_call_changes_nothing():
    model, report = patched("llama")
    classes = [type(m) for m in model.modules()]
    assert apply_liger_kernel(model).rows == report.rows
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("again", [False, True])
def test_a_head_of_another_size_is_patched_too(again):
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
    assert_same_step(ours, step(model, ids))


def test_the_report_tells_when_a_head_was_replaced():
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
    assert apply_liger_kernel(model).rows[-1].replacement == "cross_entropy"
    assert_same_step(step(model, ids), plain)


@pytest.mark.parametrize("switch", ["rope", "rms_norm", "swiglu", "embedding"])
def test_switches(switch):
    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model, **{switch: False})
    assert {r.reason for r in report.left_alone} == {f"{switch} is switched off"}
    names = nodes(model(input_ids=ids, labels=ids).loss)
    expected = {"rope": "rope", "rms_norm": "rms_norm", "swiglu": "swiglu_linear", "embedding": "embedding"}
    assert expected.pop(switch) not in names and set(expected.values()) <= names
    assert_same_step(step(model, ids), plain)


def test_embeddings_without_an_operator_are_left_alone():
    model, ids = make("llama"), tokens()
    model.model.embed_tokens.scale_grad_by_freq = True
    plain = step(model, ids)
    (row,) = (r for r in apply_liger_kernel(model).left_alone if r.kind == "embedding")
    assert "scale_grad_by_freq" in row.reason and "embedding" not in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(step(model, ids), plain)


def test_the_loss_alone():
    model, ids = make("gemma2"), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model, fused_linear_cross_entropy=False)
    assert report.rows[-1].replacement == "cross_entropy"
    out = model(input_ids=ids, labels=ids)
    assert out.logits.shape == (2, 12, 64)
    assert "cross_entropy" in nodes(out.loss) and FUSED not in nodes(out.loss)
    assert_same_step(step(model, ids), plain)
    unpatch(model)
    report = apply_liger_kernel(model, fused_linear_cross_entropy=False, cross_entropy=False)
    assert report.left_alone[-1].reason == "both losses are switched off"


@pytest.mark.parametrize("kept", [True, False])
def test_a_loss_switched_off_is_not_called(kept):
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model, cross_entropy=kept)
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert ("cross_entropy" in nodes(model(input_ids=ids, labels=ids, skip_logits=False).loss)) == kept
    assert ("cross_entropy" in nodes(model.eval()(input_ids=ids, labels=ids).loss)) == kept


def test_an_unknown_switch_is_named():
    with pytest.raises(TypeError, match=r"switches must be of rope, .* \(got flash\)"):
        apply_liger_kernel(make("llama"), flash=True)


def test_two_models_in_one_process():
    one, other, ids = make("llama"), make("llama"), tokens()
    apply_liger_kernel(one)
    assert FUSED in nodes(one(input_ids=ids, labels=ids).loss)
    names = nodes(other(input_ids=ids, labels=ids).loss)
    assert not names & {"rope", "rms_norm", "swiglu_linear", FUSED, "cross_entropy"}
    assert type(other) is LlamaForCausalLM and nn.functional.cross_entropy is TF.cross_entropy
    assert_same_step(step(one, ids), step(other, ids))


def uncalled(self, hidden_states, *args, **kwargs):
    return torch.zeros_like(hidden_states)


def turned(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_whole(q, k, cos, -sin, unsqueeze_dim)


def labelled(self, labels=None, input_ids=None):
    return CausalLMOutput(loss=self.lm_head(self.model(input_ids).last_hidden_state).float().sum() * labels.sum())


@pytest.mark.parametrize(
    "owner, name, value",
    [
        (modeling_llama.LlamaAttention, "forward", lambda *args, **kwargs: (uncalled(*args, **kwargs), None)),
        (modeling_llama.LlamaDecoderLayer, "forward", uncalled),
        (modeling_llama, "apply_rotary_pos_emb", turned),
        (modeling_llama, "eager_attention_forward", lambda module, q, *_, **__: (q.transpose(1, 2), None)),
        (LlamaForCausalLM, "forward", labelled),
    ],
    ids=["attention", "layer", "rotary", "function", "model"],
)
def test_what_someone_changed_is_changed_in_later_models(owner, name, value, monkeypatch):
    ids, first, plain, later = tokens(), *(make("llama") for _ in range(3))
    apply_liger_kernel(first)
    before = step(first, ids)
    monkeypatch.setattr(owner, name, value)
    wanted = step(plain, ids)
    apply_liger_kernel(later)
    assert_same_step(step(later, ids), wanted)
    assert not torch.equal(before[0], wanted[0])


def test_a_class_makes_patched_models_and_stays_what_it_is():
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


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_copies_stay_patched_and_pickles_do_not():
    model, ids = make("llama", tie_word_embeddings=True), tokens()
    apply_liger_kernel(model)
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight is not model.lm_head.weight
    loss = twin(input_ids=ids, labels=ids).loss
    assert FUSED in nodes(loss)
    loaded = pickled(model)
    assert type(loaded) is LlamaForCausalLM
    torch.testing.assert_close(loaded(input_ids=ids, labels=ids).loss, loss)


def test_models_of_a_class_that_patches_are_pickled_as_the_class_that_it_was():
    config, ids = make("llama").config, tokens()
    for cls in (apply_liger_kernel(LlamaForCausalLM), apply_liger_kernel(apply_liger_kernel(LlamaForCausalLM))):
        model = cls(config)
        loss = model(input_ids=ids, labels=ids).loss
        assert FUSED in nodes(copy.deepcopy(model)(input_ids=ids, labels=ids).loss)
        unpatched = copy.deepcopy(model)
        unpatch(unpatched)
        assert type(copy.deepcopy(unpatched)) is cls
        for loaded in (pickled(model), pickled(unpatched)):
            assert type(loaded) is LlamaForCausalLM
            torch.testing.assert_close(loaded(input_ids=ids, labels=ids).loss, loss)


def test_names_of_models():
    model = make("qwen3_moe")
    with pytest.raises(ValueError, match=r"apply_liger_kernel_to_llama: model must be of type llama \(got qwen3_moe\)"):
        lt.apply_liger_kernel_to_llama(model)
    assert lt.apply_liger_kernel_to_qwen3_moe(model, rope=False).replaced
    assert all(getattr(lt, name) for name in lt.__all__) and set(lt.__all__) <= set(dir(lt))
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(lt, "no_such_name")  # noqa: B009


# ---- What is not understood


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


class LlamaRMSNorm(nn.Module):  # the name promises what the class does not keep
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
def test_a_module_is_known_by_its_values(cls, row):
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


def test_an_activation_that_learns_is_left_alone():
    learnt, kept = Scale(nn.Parameter(torch.ones(()))), Scale(nn.Buffer(torch.ones(())))
    with pytest.warns(RuntimeWarning, match="left as it is"):
        rows = apply_liger_kernel(nn.Sequential(LlamaMLP(learnt), LlamaMLP(kept), LlamaMLP(Scale(2)))).rows
    reasons = ["has parameters of its own", "has parameters of its own", "computes something else"]
    assert [row.reason for row in rows[:3]] == reasons


def test_epsilon_is_read_where_the_model_keeps_it():
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
    # So small that epsilon counts, whichever it is by default.
    norm, x = copy.deepcopy(norm).to(dtype), (1e-3 * torch.randn(3, 16)).to(dtype)
    expected = norm(x)
    assert apply_liger_kernel(norm).rows[0].replacement
    assert isinstance(norm, (nn.RMSNorm, nn.LayerNorm))
    torch.testing.assert_close(norm(x), expected)


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


def test_rotary_functions_are_known_by_their_values():
    assert probe.identify_rotary(apply_rotary_whole).kind == "half"
    assert probe.identify_rotary(apply_rotary_positions).layout == "SHD"
    with pytest.raises(probe.NotUnderstood, match="apply_rotary_wrong_way computes something else"):
        probe.identify_rotary(apply_rotary_wrong_way)


@pytest.mark.parametrize(
    "case", ["usual", "heads last", "few angles", "broadcast", "half precision", "two-dimensional"]
)
def test_a_rotary_function_goes_on_as_before(case):
    original = apply_rotary_positions if case == "two-dimensional" else apply_rotary_whole
    ours = probe.rotary_function(probe.identify_rotary(original), original)
    options = {}
    shape = {"heads last": (2, 5, 3, 8), "two-dimensional": (5, 3, 8)}.get(case, (2, 3, 5, 8))
    if case == "heads last":
        options["unsqueeze_dim"] = 2
    q, k = torch.randn(shape), torch.randn(shape)
    angles = torch.randn(5, 8) if case == "two-dimensional" else torch.randn(2, 5, 8)
    if case == "broadcast":
        angles = angles[:, :1]  # one position for all: nothing that the operator takes
    if case == "half precision":
        q, k = q.bfloat16(), k.bfloat16()
    for a, b in zip(
        ours(q, k, angles.cos(), angles.sin(), **options), original(q, k, angles.cos(), angles.sin(), **options)
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


# ---- Logits


def test_logits_on_request():
    model, ids = make("gemma2"), tokens()
    logits = model(input_ids=ids).logits
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert "logits" not in model(input_ids=ids, labels=ids)
    out = model(input_ids=ids, labels=ids, skip_logits=False)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-5)
    assert_same_step(step(model, ids, skip_logits=False), plain)
    model.eval()
    torch.testing.assert_close(model(input_ids=ids, labels=ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert "logits" not in model(input_ids=ids, labels=ids, skip_logits=True)
    torch.testing.assert_close(model(input_ids=ids, labels=ids, return_dict=False)[1], logits, rtol=1e-4, atol=1e-5)
    model.train()
    assert model(input_ids=ids, labels=ids, return_dict=False)[0].dim() == 0


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    vocabulary: int = dataclasses.field(default=64, init=False)


@pytest.mark.parametrize(
    "output, logits_of",
    [
        (lambda loss, logits: loss, None),
        (lambda loss, logits: [loss, logits], lambda out: out[1]),
        (lambda loss, logits: (loss, (logits,)), lambda out: out[1][0]),
        (lambda loss, logits: (loss, [Pair(loss, logits)]), lambda out: out[1][0].logits),
        (Pair, lambda out: out.logits),
        (Output, lambda out: out.logits),
        (lambda loss, logits: (loss, Output(loss, logits)), lambda out: out[1].logits),
        (lambda loss, logits: {"loss": loss, "logits": logits}, lambda out: out["logits"]),
        (lambda loss, logits: {0: loss, "more": collections.OrderedDict({1: logits})}, lambda out: out["more"][1]),
        (lambda loss, logits: CausalLMOutput(loss, hidden_states=(CausalLMOutput(loss, logits),)),
         lambda out: out.hidden_states[0].logits),
    ],
)  # fmt: skip
def test_logits_are_found_in_any_output(output, logits_of):
    losses = []

    class Model(LlamaForCausalLM):
        def forward(self, input_ids, labels):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            losses.append(self.loss_function(logits, labels, 64))
            return output(losses[-1], logits)

    model, ids = make("llama"), tokens()
    model.__class__ = Model
    plain = model(ids, ids)
    apply_liger_kernel(model)
    for skip in (True, False):
        ours = model(ids, ids, skip_logits=skip)
        assert type(ours) is type(plain) and (FUSED in nodes(losses[-1])) == skip
        torch.testing.assert_close(losses[-1], losses[0])
        if logits_of is None:
            assert ours is losses[-1]
        elif skip:
            assert logits_of(ours) is None
        else:
            torch.testing.assert_close(logits_of(ours), logits_of(plain), rtol=1e-4, atol=1e-5)


def test_the_head_on_its_own_gives_logits():
    model, _ = patched("llama")
    assert type(model.lm_head(torch.randn(1, 3, 32))) is torch.Tensor


def test_a_failing_forward_leaves_the_head_usable():
    model, _ = patched("llama")
    with pytest.raises((RuntimeError, ValueError)):
        model(input_ids=tokens(), labels=tokens(3, 7))
    assert type(model.lm_head(torch.randn(1, 3, 32))) is torch.Tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda x, t: TF.cross_entropy(x.float().view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(x[..., :-1, :].contiguous().view(-1, 10), t[..., 1:].reshape(-1)),
        lambda x, t: TF.cross_entropy(x[:, :-1].reshape(-1, x.size(-1)), t[:, 1:].reshape(-1), reduction="sum"),
        lambda x, t: TF.cross_entropy(
            input=(x * 3 / 5).reshape(-1, x.shape[-1]), target=t.flatten(), label_smoothing=0.1
        ),
        lambda x, t: TF.cross_entropy((2 * torch.tanh(x / 2)).view(-1, 10), t.view(-1)),
        lambda x, t: nn.CrossEntropyLoss()(x.to(torch.float32).view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(x[t > 4], t[t > 4]),
        # what has to be made first
        lambda x, t: TF.cross_entropy(x.transpose(1, 2), t),
        lambda x, t: TF.cross_entropy((x + 1).view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(torch.tanh(torch.tanh(x)).view(-1, 10), t.view(-1)),
        lambda x, t: TF.cross_entropy(x.view(-1, 10), TF.one_hot(t.view(-1), 10).float()),
        lambda x, t: torch.logsumexp(x, -1).sum() + x.sum() + (1 - x).mean() + len(x) + x[..., 3].sum() + x[0].sum(),
        lambda x, t: (abs(-x) + x % 2 + 2**x + (+x) ** 2).sum() + (torch.eye(5) @ x @ x.mT).sum(),
        lambda x, t: x.sum() * ((x == x // 2).sum() + (x != 3 % x).sum() + (3 // x > 1).sum() + len({x, x})),
        lambda x, t: x.sum() * (~(x > 0) & (x < 1) | (x > 2)).sum() + x.sum() * (3.0 in x),
        lambda x, t: x.sum() * bool(x.sum() > 0) + x.sum() * int(x[0, 0, 0] * 99) + x.sum() * float(x[0, 0, 1]),
        lambda x, t: x.contiguous(memory_format=torch.contiguous_format).mean() + x.reshape(shape=(-1, 10)).mean(),
        lambda x, t: x.view(-1)[0] * x.view(torch.int32).sum(),
        lambda x, t: x.view([-1, 10])[0].sum() + x.view(t.shape + (10,)).mean(),
        lambda x, t: torch.cat([x, x]).mean() + TF.log_softmax(x.to(x.device, torch.float64), -1)[0].sum(),
    ],
)
def test_deferred_logits_are_logits(use):
    assert_same_of_deferred(use)


def assert_same_of_deferred(use):
    head, target = nn.Linear(6, 10), tokens(2, 5, vocabulary=10)
    results = []
    for deferred in (False, True):
        hidden = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if deferred:
            wrapped = copy.deepcopy(head)
            wrapped.forward = lambda x, call=None: TF.linear(x, head.weight, head.bias) if call is None else call.run(
                x, head.weight, head.bias, None)  # fmt: skip
            x = DeferredLogits(wrapped, hidden, torch.float32)
            assert (x.shape, x.dim(), x.ndim, x.dtype, x.requires_grad) == ((2, 5, 10), 3, 3, torch.float32, True)
        else:
            x = head(hidden)
        loss = use(x, target)
        results.append((loss, *torch.autograd.grad(loss, (hidden, head.weight, head.bias))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


def added_to(x, y):
    x += y


def assigned_to(x, index, y):
    x[index] = y


def loss_of(x, target, *written):
    """What was written to x, whoever returned it, is in the loss."""
    return TF.cross_entropy(x.view(-1, 10), target.flatten())


@pytest.mark.parametrize(
    "use",
    [
        lambda x, t: loss_of(x, t, x.mul_(3)),
        lambda x, t: loss_of(x, t, torch.clamp_(x, -0.1, 0.1)),
        lambda x, t: loss_of(x.float(), t, x.tanh_()),
        lambda x, t: loss_of(x, t, x.float().mul_(3)),
        lambda x, t: loss_of(x, t, added_to(x, torch.arange(10))),
        lambda x, t: loss_of(x, t, assigned_to(x, (slice(None), slice(None), [3, 5]), torch.finfo(x.dtype).min)),
        lambda x, t: loss_of(x, t, assigned_to(x, x > 0.5, 0.5)),
        lambda x, t: loss_of(x, t, x.contiguous().mul_(3)),
        lambda x, t: loss_of(x, t, x.view(-1, 10).masked_fill_(t.view(-1, 1) > 4, -3.0)),
        lambda x, t: loss_of(x, t, x[:, 1:][0].reshape(2, 2, 10)[-1].zero_()),
        lambda x, t: loss_of(x[1:], t[1:], x.mul_(3)),
        lambda x, t: loss_of(x.transpose_(0, 1).contiguous(), t.t()) * len(x) * x.shape[0] * x.dim(),
        # copies stay what they are
        lambda x, t: loss_of(x * 2, t, x.zero_()),
        lambda x, t: loss_of(x.view(-1, 10)[t.view(-1) > 0], t, x.zero_()),
        lambda x, t: loss_of(x[:, :-1].contiguous(), t[:, 1:], x.zero_()),
        lambda x, t: loss_of(x, t, x[:, :-1].reshape(-1, 10).zero_()),
        # and gradients what they were
        lambda x, t: loss_of(x, t, x.register_hook(lambda gradient: 2 * gradient)),
        lambda x, t: loss_of(x, t, torch.no_grad()(lambda: x.argmax(-1))()),
    ],
)
def test_what_is_written_to_deferred_logits_is_kept(use):
    assert_same_of_deferred(use)


def test_hooks_on_the_head_see_logits():
    model, _ = patched("llama")
    seen, ids = [], tokens()
    model.lm_head.register_forward_hook(lambda module, inputs, out: seen.append(type(out)))
    loss = model(input_ids=ids, labels=ids).loss
    assert seen == [torch.Tensor] and FUSED not in nodes(loss)


def test_hooks_that_gather_weights_run_once_around_the_loss():
    """As those of DeepSpeed's ZeRO-3, between which alone the weight is whole."""
    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    whole, called = model.lm_head.weight.data, []

    def gather(module, inputs):
        called.append("gather")
        module.weight.data = whole

    def free(module, inputs, out):
        called.append("free")
        module.weight.data = torch.empty(0)

    for hook in (gather, free):
        hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(free)
    model.lm_head.weight.data = torch.empty(0)
    loss = model(input_ids=ids, labels=ids).loss
    assert called == ["gather", "free"] and FUSED in nodes(loss)
    torch.testing.assert_close(loss.detach(), plain[0])


@pytest.mark.parametrize("hook", [lambda m, inputs: (2 * inputs[0],), lambda m, inputs: (2 * inputs[0], *inputs[1:])])
def test_hooks_before_the_head_change_its_input_once(hook):
    model, ids = make("llama"), tokens()
    handle = model.lm_head.register_forward_pre_hook(hook)
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert_same_step(step(model, ids), plain)
    handle.remove()
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)


def test_hooks_on_every_module_see_what_they_saw():
    model, ids = make("llama"), tokens()
    seen: list = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, out: seen.append((out.shape, type(out))) if probe.is_linear(module) else None
    )
    try:
        plain = step(model, ids)
        before = list(seen)
        apply_liger_kernel(model)
        seen.clear()
        assert_same_step(step(model, ids), plain)
    finally:
        handle.remove()
    assert sorted(map(str, seen)) == sorted(map(str, before)) and len(seen) == 15
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)


# ---- Training loops


def test_another_thread_gets_logits():
    model, ids = make("llama"), tokens()
    expected = model(input_ids=ids, labels=ids)
    apply_liger_kernel(model)
    inside, others_done, losses = threading.Event(), threading.Event(), []

    def wait(*_):
        if threading.current_thread() is trainer:
            inside.set()
            others_done.wait(60)

    model.model.layers[0].register_forward_hook(wait)
    trainer = threading.Thread(target=lambda: losses.append(model(input_ids=ids, labels=ids).loss))
    trainer.start()
    assert inside.wait(60)
    try:
        outputs = [model(input_ids=ids), model(input_ids=ids, labels=ids)]
    finally:
        others_done.set()
        trainer.join()
    for out in outputs:
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-5)
    for loss in (outputs[1].loss, *losses):
        torch.testing.assert_close(loss, expected.loss)
    assert FUSED in nodes(losses[0])


def test_a_number_of_items_divides_the_sum():
    model, ids = make("mistral"), tokens()
    plain = step(model, ids, num_items_in_batch=torch.tensor(7))
    apply_liger_kernel(model)
    assert_same_step(step(model, ids, num_items_in_batch=torch.tensor(7)), plain)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, ids = make("qwen2"), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same_step(step(model, ids), plain)


def test_tied_and_frozen_heads():
    model, ids = make("gemma", tie_word_embeddings=True), tokens()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert_same_step(step(model, ids), plain)
    model = make("llama")
    model.lm_head.requires_grad_(False)
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert_same_step(step(model, ids), plain)
    assert "lm_head.weight" not in plain[1]


@pytest.mark.parametrize("target", ["lm_head", "gate_proj", "down_proj", "o_proj"])
@pytest.mark.parametrize("first", ["lora", "patch"])
def test_lora(target, first):
    from peft import LoraConfig, get_peft_model

    def build(patch):
        model = make("llama")
        torch.manual_seed(1)
        if patch == "patch":
            apply_liger_kernel(model)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=[target], init_lora_weights=False))
        report = apply_liger_kernel(model) if patch == "lora" else None
        return model, report

    ids = tokens()
    plain = step(build("")[0], ids)
    model, report = build(first)
    assert any("lora" in name for name in plain[1])
    assert_same_step(step(model, ids), plain)
    loss = model(input_ids=ids, labels=ids).loss
    if target != "lm_head":
        # A wrapped projection is called and not read.
        assert {"rms_norm", "swiglu" if target == "down_proj" else "swiglu_linear", FUSED} <= nodes(loss)
    else:
        assert FUSED not in nodes(loss)
    if report and target == "lm_head":
        assert report.left_alone[-1].reason == "its head is a wrapped Linear"


def losses_of_a_trainer(folder, patch, **arguments):
    from transformers import Trainer, TrainingArguments

    model = make("llama")
    if patch:
        apply_liger_kernel(model)
    data = [
        {"input_ids": tokens(8, seed=i), "labels": torch.where(torch.arange(8) < i % 5, -100, tokens(8, seed=i))}
        for i in range(48)
    ]
    options = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=6, logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to="none", use_cpu=True, disable_tqdm=True,
        save_strategy="no", seed=0, **arguments,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=data, eval_dataset=data[:4])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"], torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_trainer_accumulates_gradients_exactly(tmp_path):
    plain, ours = (losses_of_a_trainer(str(tmp_path / name), name == "ours") for name in ("plain", "ours"))
    assert len(plain[0]) == 6
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), rtol=1e-4, atol=1e-4)
    assert abs(ours[1] - plain[1]) < 1e-3
    # AdamW turns the sign of a vanishing gradient into a whole step.
    assert float((ours[2] - plain[2]).pow(2).mean().sqrt()) < 1e-3


# ---- Wrappers


@pytest.fixture
def fresh_dynamo():
    """torch.compile counts what one function was compiled for; all models share that of transformers."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "phi3", "glm4", "granite", "cohere"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compile_makes_one_graph(name):
    model, ids = make(name), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    backend, graphs = count_graphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours = step(compiled, ids)
    assert_same_step((ours[0], {n.removeprefix("_orig_mod."): g for n, g in ours[1].items()}), plain)
    called = {str(n.target) for g in graphs for n in g.graph.nodes}
    assert len(graphs) == 1 and f"liger.{FUSED}" in str(called) and "liger.rope" in str(called)
    step(compiled, tokens(seed=5))
    assert len(graphs) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_trains_it(monkeypatch):
    """In torch 2.11 Inductor spells out an operator's arguments, and all that they are made of, where it meets it first.
    That is short for operators of every layer; of one that backward ends with it grows exponentially with the layers."""
    import torch._inductor.graph as lowering

    model, ids = make("llama", num_hidden_layers=3), tokens()
    plain = step(model, ids)
    compiled = torch.compile(model, fullgraph=True)
    assert apply_liger_kernel(compiled).replaced
    lengths = []
    monkeypatch.setattr(lowering, "LazyString", lambda spell, *args: lengths.append(len(spell(*args))), raising=False)
    with torch._inductor.config.patch(force_disable_caches=True):
        ours = step(compiled, ids)
    assert_same_step((ours[0], {n.removeprefix("_orig_mod."): g for n, g in ours[1].items()}), plain)
    assert max(lengths, default=0) < 1_000_000
    assert lengths or not hasattr(lowering, "LazyString")


def test_data_parallel_wrappers_are_looked_through():
    model = make("llama")
    assert apply_liger_kernel(nn.DataParallel(model)).replaced and unpatch(nn.DataParallel(model))


def test_hooks_of_the_last_projection_are_called():
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model)
    seen: list = []
    handle = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    expected = model(input_ids=ids, labels=ids).loss
    assert seen and {"swiglu", "swiglu_linear"} <= nodes(expected)
    handle.remove()
    loss = model(input_ids=ids, labels=ids).loss
    assert len(seen) == 1 and "swiglu" not in nodes(loss)
    torch.testing.assert_close(loss, expected)


def test_models_placed_by_accelerate():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    assert not apply_liger_kernel(model).left_alone
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss)
    assert_same_step(step(model, ids), plain)
    unpatch(model)
    assert_same_step(step(model, ids), plain, tolerance=0.0)


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # The process has one state, which a Trainer may have set.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_wraps_and_unwraps_the_patched_forward(accelerator):
    model, ids = make("llama"), tokens()
    expected = list(inspect.signature(model.forward).parameters)
    report = apply_liger_kernel(model)
    assert list(inspect.signature(model.forward).parameters) == expected
    model = accelerator.prepare(model)
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss) and apply_liger_kernel(model).rows == report.rows
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert FUSED in nodes(model(input_ids=ids, labels=ids).loss) and apply_liger_kernel(model).rows == report.rows
    model.forward = lambda **inputs: None
    assert apply_liger_kernel(model).rows[-1].reason == "its forward was replaced"


GROUP = """
import gc, torch, torch.distributed as dist
from language_models import make, nodes, step, tokens
from liger_ops import projections
from liger_ops.transformers import apply_liger_kernel, rewrite, unpatch

def assert_same(ours, plain):
    torch.testing.assert_close(ours[0], plain[0])
    for name, gradient in ours[1].items():
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(whole, plain[1][name], rtol=1e-4, atol=1e-5)

def run(mesh, ids):
BODY

dist.init_process_group("gloo", init_method="file://STORE", rank=0, world_size=1)
run(dist.init_device_mesh("cpu", (1,)), tokens())
# The group's threads end with it, and it with the last model; none of them may want an interpreter that is gone.
dist.destroy_process_group()
gc.collect()
print("done")
"""


def check_in_group(body, tmp_path):
    """Runs it in the only process of a group, where `mesh` and `ids` are known."""
    code = GROUP.replace("STORE", str(tmp_path / "store")).replace("BODY", textwrap.indent(body, "    "))
    assert output_of(code).endswith("done\n")


DISTRIBUTED = """
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as tp

first = "model.layers.0."
whole = tp.ColwiseParallel(use_local_output=False)
head = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
plans = {
    "norm": ("llama", {"model.norm": tp.SequenceParallel(), "lm_head": head}),
    "gates": ("llama", {first + "mlp.gate_proj": whole, first + "mlp.up_proj": whole,
                        first + "mlp.down_proj": tp.RowwiseParallel()}),
    "packed gates": ("phi3", {first + "mlp.gate_up_proj": whole, first + "mlp.down_proj": tp.RowwiseParallel()}),
}
for name, plan in plans.values():
    plain = step(make(name), ids)
    model = make(name)
    apply_liger_kernel(model)
    tp.parallelize_module(model, mesh, plan)
    assert_same(step(model, ids), plain)
    assert "rms_norm" in nodes(model(input_ids=ids, labels=ids).loss)

# Norms that layers add to, or keep the input of, without a hook that tells them apart.
projections.LARGE = 0
norm = distribute_module(model.model.norm, mesh)
x = distribute_tensor(torch.randn(3, 32, requires_grad=True), mesh)
expected = norm(x + x).full_tensor()
torch.testing.assert_close(rewrite.add_norm(norm, x, x)[0].full_tensor(), expected)
torch.testing.assert_close(rewrite.keep_norm(norm, x + x)[0].full_tensor(), expected)
"""


def test_distributed_norms_and_gates(tmp_path):
    check_in_group(DISTRIBUTED, tmp_path)


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
