"""LoRA layers of peft over bases whose own forward computes the projection: the same numbers, and the same operations of
peft."""

import contextlib
import copy
from collections import defaultdict

import pytest
import torch
from checks import assert_no_worse, count_graphs, gradients, roundings
from language_models import make, step, tokens, train
from lora_bases import BASES, OVER_CODES, Codes, adapt, with_bases
from lora_layers import BASE, CALLS, LAYERS, assert_as_accurate, lora_rows, record_calls, results, taken
from pairs import pairwise
from patched_models import assert_same_logits, assert_same_step, logits_of
from peft import PeftModel
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from liger_ops.linear import peft, project
from liger_ops.transformers import apply_liger_kernel

pytestmark = pytest.mark.usefixtures("as_large_models")


@pytest.fixture
def calls(monkeypatch):
    return record_calls(monkeypatch)


# ---- One layer, beside its base and the adapters' formula


class Two(nn.Module):
    """Two projections of one input."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 24), nn.Linear(16, 8)

    def forward(self, x):
        return project.project((self.q, self.k), x)


def two(kind, dtype=torch.float32, adapter_dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = with_bases(Two().to(dtype), kind)
    return adapt(model, kind, ["q", "k"], adapter_dtype, **options).base_model.model


def learned(layers):
    return [weight for layer in layers for weight in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)]


def results_of(model, call, x, upstream):
    """Projections, and the gradients of x and the adapters."""
    ys = call(model)
    found = torch.autograd.grad(ys, [x, *learned((model.q, model.k))], [dy.to(y.dtype) for dy, y in zip(upstream, ys)])
    return [*ys, *found]


def check_layers(model, plain, x, precision, autocasts):
    """The base's own result and gradient, as they are, plus the adapters' part."""
    layers, upstream = (plain.q, plain.k), [torch.randn(3, 5, m) for m in (24, 8)]

    def cast():
        return torch.autocast("cpu", torch.bfloat16) if autocasts else contextlib.nullcontext()

    with cast():
        bases = [layer.base_layer(x) for layer in layers]
    of_bases = [torch.autograd.grad(y, x, dy.to(y.dtype))[0] for y, dy in zip(bases, upstream)]

    def formula(x, *rest):
        given, dx, weights = rest[:2], rest[2], rest[3:]
        # A term whose gradient is that of the bases.
        ys = [y + layer.scaling["default"] * functional.linear(functional.linear(x, a), b)
              for y, layer, a, b in zip(given, layers, weights[::2], weights[1::2])]  # fmt: skip
        return *ys, (x * dx).sum()

    leaves = [x, *bases, sum(t.double() for t in of_bases), *learned(layers)]
    wanted = [x, *learned(layers)]
    inputs = [t.detach().double().requires_grad_(any(t is w for w in wanted)) for t in leaves]
    slopes = [*(dy.double() for dy in upstream), torch.ones((), dtype=torch.float64)]
    exact = gradients(formula, inputs, slopes)
    bounds = roundings(formula, inputs, slopes, exact, precision)
    with cast():
        theirs = results_of(plain, lambda model: (model.q(x), model.k(x)), x, upstream)
        ours = results_of(model, lambda model: model(x), x, upstream)
    places = [0, 1, *range(3, len(exact))]
    for i, mine, other in zip(places, ours, theirs, strict=True):
        assert_no_worse(f"result {i}", mine, other, exact[i], bounds=(bounds, i))


@pairwise(
    kind=[*BASES],
    dtypes=[(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float16,) * 2],
    autocasts=[False, True],
)
def test_layers_are_as_accurate_as_those_of_peft(kind, dtypes, autocasts):
    torch.manual_seed(2)
    x = torch.randn(3, 5, 16).to(dtypes[0]).requires_grad_()
    plain, model = two(kind, *dtypes), two(kind, *dtypes)
    apply_liger_kernel(model)
    with pytest.MonkeyPatch.context() as patch:
        calls = record_calls(patch)
        check_layers(model, plain, x, torch.bfloat16 if autocasts else dtypes[0], autocasts)
    assert calls and sum(call.adapters for call in calls) == 2


@pytest.mark.parametrize("kind", OVER_CODES)
@pytest.mark.parametrize(
    "computes, returns, dtype, autocasts",
    [
        (torch.bfloat16, torch.bfloat16, torch.float32, False),
        (torch.bfloat16, torch.float32, torch.bfloat16, False),
        (torch.float16, torch.float16, torch.bfloat16, False),
        (torch.float32, torch.float32, torch.float32, True),
        (torch.float16, torch.float16, torch.float32, True),
    ],
)
def test_results_of_another_dtype_than_the_input(kind, computes, returns, dtype, autocasts, calls):
    x = torch.randn(3, 5, 16).to(dtype).requires_grad_()
    found = []
    for _ in range(2):
        model = two(kind, dtype)
        for module in model.modules():
            if isinstance(module, Codes):
                module.computes, module.returns = computes, returns
        found.append(model)
    plain, model = found
    apply_liger_kernel(model)
    check_layers(model, plain, x, torch.bfloat16 if autocasts else torch.float32, autocasts)
    assert calls


@pytest.mark.parametrize("kind", OVER_CODES)
def test_dtypes_under_the_autocast_of_gpus(kind, monkeypatch):
    """peft asks whether that is on, not which device computes."""
    model, plain = two(kind), two(kind)
    apply_liger_kernel(model)
    x = torch.randn(3, 16)
    for each in (model, plain):
        for module in each.modules():
            if isinstance(module, Codes):
                module.returns = torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert model.q(x).dtype == plain.q(x).dtype == torch.float16
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: True)
        assert model.q(x).dtype == plain.q(x).dtype


def test_every_lora_layer_over_codes_is_in_the_table():
    known = {name for _, name in peft.PEFT_LINEARS}
    assert {cls.__name__ for cls in OVER_CODES.values()} | {"Linear4bit", "Linear8bitLt"} == known


@pytest.mark.parametrize("kind", BASES)
def test_the_report_says_why_a_base_is_called(kind):
    model = two(kind, torch.bfloat16 if kind == "nf4" else torch.float32)
    read = peft.adapted(model.q, torch.bfloat16 if kind == "nf4" else torch.float32)
    assert read.weight.reason == BASES[kind][1]
    # The report of a four-bit base supposes an input of its own dtype.
    expected = "" if kind == "nf4" else f"calls its base, because {BASES[kind][1]}"
    assert lora_rows(apply_liger_kernel(model)) == {("lora_linear", expected): 2}


def test_hooks_of_bases_see_the_input_and_change_the_result():
    model = two("linear")
    apply_liger_kernel(model)
    seen, x = [], torch.randn(3, 16)
    before = model(x)[0]
    handles = [
        model.q.base_layer.register_forward_pre_hook(lambda module, given: seen.append(given[0])),
        model.q.base_layer.register_forward_hook(lambda module, given, y: y + 1),
    ]
    torch.testing.assert_close(model(x)[0], before + 1)
    assert len(seen) == 1 and seen[0] is x
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(model(x)[0], before)


def test_results_of_another_shape(calls):
    """A base that drops the last row: peft adds what it can broadcast."""
    model, plain = two("linear"), two("linear")
    apply_liger_kernel(model)
    for each in (model, plain):
        each.q.base_layer.register_forward_hook(lambda module, given, y: y.sum(0, keepdim=True))
    x = torch.randn(3, 16)
    torch.testing.assert_close(model(x), (plain.q(x), plain.k(x)))
    assert calls


def test_layers_of_several_kinds_are_one_call(calls):
    torch.manual_seed(0)
    plain = two("linear")
    plain.q.base_layer = nn.Linear(16, 24)
    model = copy.deepcopy(plain)
    apply_liger_kernel(model)
    x = torch.randn(3, 16)
    torch.testing.assert_close(model(x), (plain.q(x), plain.k(x)))
    assert taken(calls) == [2]
    # Another layer without adapters is only called.
    plain.k = model.k = nn.Sequential(nn.Linear(16, 8))
    torch.testing.assert_close(model(x), (plain.q(x), plain.k(x)))
    assert taken(calls) == [1]


# ---- Models


def gpt2():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def build(order, kind, dtype=torch.float32, adapter_dtype=None, **options):
    """order: "" for peft's own, or when the model is patched: "before" or "after" it gets its adapters."""
    model, targets = (gpt2(), ["c_attn", "c_proj", "c_fc"]) if kind == "conv1d" else (make("llama"), BASE)
    model = model.to(dtype)
    model = model if kind == "conv1d" else with_bases(model, kind)
    report = apply_liger_kernel(model) if order == "before" else None
    model = adapt(model, kind, targets, adapter_dtype, **options)
    if order:
        report = apply_liger_kernel(model)
    return model, report


def calls_of(kind):
    """Of a layer. Those of GPT-2 are c_attn, c_proj, c_fc and c_proj."""
    return [1, 1, 1, 1] if kind == "conv1d" else CALLS


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["gptq", "hqq", "conv1d", "hooked"])
def test_models_are_as_accurate_as_those_of_peft(kind, dtype, order, calls):
    plain, ids = build("", kind, dtype)[0], tokens()
    theirs = results(plain, ids)
    assert not calls
    model, report = build(order, kind, dtype)
    count = sum(map(peft.is_lora, model.modules()))
    assert lora_rows(report) == {("lora_linear", f"calls its base, because {BASES[kind][1]}"): count}
    ours = results(model, ids)
    assert taken(calls) == 2 * LAYERS * calls_of(kind)
    assert_as_accurate(ours, theirs, plain, ids, dtype)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["int8", "awq"])
def test_steps_are_those_of_peft(kind, order, calls):
    ids, expected = tokens(), step(build("", kind)[0].train(), tokens())
    model, _ = build(order, kind)
    model.train()
    assert_same_step(model, ids, expected)
    calls.clear()
    step(model, ids)
    assert taken(calls) == LAYERS * CALLS


@pytest.mark.parametrize("kind", ["int8", "gptq", "conv1d"])
def test_twenty_steps_of_training_end_as_those_of_peft(kind, calls):
    """As test_twenty_steps_of_training_end_as_those_of_peft in test_transformers_lora.py, with its factor. Weights in int8
    have no fp64: there the losses are peft's but for roundings."""
    errors = {"ours": defaultdict(lambda: 1.0), "eager": defaultdict(lambda: 1.0)}
    for seed in range(2):
        start = build("", kind, init_lora_weights=True)[0]
        for i, p in enumerate(start.parameters()):
            if seed and p.requires_grad:
                p.data.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        found = {"eager": train(copy.deepcopy(start), 20)}
        exact = found["eager"] if kind == "int8" else train(copy.deepcopy(start).double(), 20)
        apply_liger_kernel(start)
        assert not calls
        found["ours"] = train(start, 20)
        assert taken(calls) == 21 * LAYERS * calls_of(kind)
        for who, result in found.items():
            for key, wanted in exact.items():
                if kind == "int8" and key == "logits":  # of rounded activations
                    continue
                error = float((result[key] - wanted).pow(2).mean().sqrt()) / float(wanted.abs().max())
                errors[who][key] *= error**0.5
    for key, error in errors["ours"].items():
        # Roundings of 20 steps.
        eps = torch.finfo(torch.float32).eps
        allowed = 64 * eps if kind == "int8" else 8 * errors["eager"][key] + eps
        assert error <= allowed, key


@pytest.mark.parametrize("kind", ["int8", "gptq", "conv1d"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(kind, reentrant, calls):
    model, ids = build("after", kind)[0].train(), tokens()
    expected = step(model, ids)
    calls.clear()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same_step(model, ids, expected)
    assert calls


@pytest.mark.parametrize("kind", ["gptq", "hooked"])
def test_compiled_models(kind, calls):
    torch._dynamo.reset()
    (plain, _), (model, _), ids = build("", kind), build("after", kind), tokens()
    expected = step(plain, ids)
    calls.clear()
    backend, graphs = count_graphs()
    compiled = torch.compile(model, backend=backend)
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    assert graphs and taken(calls) == LAYERS * CALLS
    torch.testing.assert_close(loss.detach(), expected[0])
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[1][name], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


# ---- What peft does with its layers


def second_adapter(model):
    torch.manual_seed(2)
    config = copy.deepcopy(model.peft_config["default"])
    config.r, config.lora_alpha = 3, 5
    model.add_adapter("other", config)


def switch(model):
    second_adapter(model)
    model.set_adapter("other")


def two_adapters(model):
    second_adapter(model)
    model.base_model.set_adapter(["default", "other"])


def merge(model):
    model.merge_adapter()


def unmerge(model):
    model.merge_adapter()
    model.unmerge_adapter()


def disable(model):
    return model.disable_adapter()


def set_scale(model):
    for layer in filter(peft.is_lora, model.modules()):
        layer.set_scale("default", 3.0)


# With whether adapters are added afterwards.
OPERATIONS = {switch: True, two_adapters: True, disable: False, set_scale: True, merge: False, unmerge: True}
MERGEABLE = ["int8", "conv1d", "hooked"]
CASES = [
    *((kind, operation) for kind in MERGEABLE for operation in OPERATIONS),
    *((kind, operation) for kind in OVER_CODES for operation in OPERATIONS if operation not in (merge, unmerge)),
]


@pytest.mark.parametrize("kind, operation", CASES, ids=lambda value: getattr(value, "__name__", value))
def test_operations_of_peft(kind, operation, calls):
    ids, found = tokens(), []
    for order in ("", "after"):
        model, _ = build(order, kind)
        if kind == "int8":
            # In evaluation, bitsandbytes rounds activations.
            model.train()
        logits_of(model, ids)
        calls.clear()
        with operation(model) or contextlib.nullcontext():
            logits = logits_of(model, ids)
            if order:
                assert taken(calls) == (LAYERS * calls_of(kind) if OPERATIONS[operation] else [])
                assert_same_logits(logits, found[0][0], model, ids)
        found.append((logits, {name: t.clone() for name, t in model.state_dict().items()}))
    (_, theirs), (_, ours) = found
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["int8", "gptq", "conv1d"])
def test_saved_and_loaded(kind, tmp_path, calls):
    (plain, _), (model, _), ids = build("", kind), build("after", kind), tokens()
    plain.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    files = [(tmp_path / who / "adapter_model.safetensors").read_bytes() for who in ("ours", "theirs")]
    assert files[0] == files[1]
    if kind == "gptq":  # the stand-in is not saved
        return
    base = gpt2() if kind == "conv1d" else with_bases(make("llama"), kind)
    loaded = PeftModel.from_pretrained(base, tmp_path / "ours")
    apply_liger_kernel(loaded)
    logits = logits_of(loaded.train(), ids)
    assert taken(calls) == LAYERS * calls_of(kind)
    assert_same_logits(logits, logits_of(plain.train(), ids), loaded, ids)


@pytest.mark.parametrize("kind", ["gptq", "awq", "int8"])
def test_an_adapted_layer_without_gradients_runs_fused(kind, calls):
    model, plain, x = two(kind), two(kind), torch.randn(1, 1, 16)
    apply_liger_kernel(model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), (plain.eval().q(x), plain.k(x)))
    assert taken(calls) == [2]


def test_dropout_in_adapters(calls):
    model, _ = build("after", "gptq", lora_dropout=0.25)
    ids, losses = tokens(), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        losses.append(step(model.train(), ids)[0])
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    assert taken(calls) == 3 * LAYERS * CALLS
