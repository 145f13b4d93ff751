"""What every kind of rewritten block must do, for each row of KINDS. What a kind recognises, what it leaves alone and its
numbers stand in its own file."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from liger_ops.transformers import SWITCHES, apply_liger_kernel, unpatch
from tests.support.checks import path_taken
from tests.support.models.language_models import known, step, tokens
from tests.support.models.patched_models import assert_same_step, assert_trains_and_generates, calls_of, through_pickle
from tests.support.models.tiny_models import GATED, TINY, WITH_CONVOLUTIONS, tiny


class Kind(NamedTuple):
    models: list[str]
    rows: Callable[[NamedTuple], bool]  # of a report, that are of this kind
    found: tuple[str, str] | dict[str, tuple[str, str]]  # replacement and reason of these rows. By model, "" for others
    off: tuple[str, str] = ("", "")  # without the switch
    quick: tuple[str, ...] = ()  # models, of which the first is copied
    operator: str = ""  # where it has not the name of its kind
    calls: int | dict[str, int] | None = 1  # of the operator in each row, or in each model
    switches: tuple[str, ...] = ()  # where the only one that is on has not the name of the kind
    cached: bool = True  # whether a model has a cache in training
    options: dict[str, int] = {}  # of the models
    compiled: tuple[str, str] | None = None  # a model and its module


def of(kind: str) -> Callable[[NamedTuple], bool]:
    return lambda row: row.kind == kind


DELTA_NETS = (
    "qwen3_next", "qwen3_5_text", "kimi_linear", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini", "bailing_hybrid",
    "qwen4_exp_text",
)  # fmt: skip
SHORT = ("lfm2", "lfm2_moe", "lfm3")
SPLIT = dict.fromkeys(DELTA_NETS, ("causal_conv1d_split", "")) | dict.fromkeys(SHORT, ("short_conv", ""))
NO_CONVOLUTION = "causal_conv1d is switched off"
MIXER, ATTENTION = "model.layers.0.linear_attn", "model.layers.0.self_attn"
KINDS = {
    "causal_conv1d": Kind(
        [*WITH_CONVOLUTIONS], of("conv"), SPLIT | {"": ("causal_conv1d", "")}, ("", NO_CONVOLUTION),
        ("mamba2", "lfm2"),
    ),
    "causal_conv1d_split": Kind(
        [*DELTA_NETS], of("conv"), ("causal_conv1d_split", ""), ("delta_gates", f"no causal_conv1d: {NO_CONVOLUTION}"),
        ("qwen3_next", "qwen3_5_text", "olmo_hybrid"), switches=("causal_conv1d",), cached=False,
    ),
    "short_conv": Kind(
        [*SHORT], of("conv"), ("short_conv", ""), ("", NO_CONVOLUTION), ("lfm2",), switches=("causal_conv1d",),
        cached=False, compiled=("lfm2", ""),
    ),
    "delta_gates": Kind(
        [name for name in DELTA_NETS if name not in ("kimi_linear", "bailing_hybrid")], of("conv"),
        ("delta_gates", f"no causal_conv1d: {NO_CONVOLUTION}"), ("causal_conv1d_split", ""),
        ("olmo_hybrid",), compiled=("olmo_hybrid", MIXER),
    ),
    "rms_norm_gated": Kind(
        [*GATED], lambda row: row.kind == "norm" and ("Gated" in row.type or row.module.endswith(".hc_norm")),
        ("rms_norm_gated", ""), ("", "rms_norm is switched off"),
        ("mamba2", "falcon_h1"), switches=("rms_norm",), compiled=("mamba2", "backbone.layers.0.mixer.norm"),
    ),
    # Of attention, which has no row, and of shared experts.
    "sigmoid_gate": Kind(
        ["afmoe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen2_moe", "qwen4_exp_text"], of("gate"),
        ("sigmoid_gate", ""), ("", "sigmoid_gate is switched off"), ("qwen2_moe",),
        switches=("sigmoid_gate", "rope"), compiled=("afmoe", ATTENTION),
        calls={"qwen3_next": 3, "qwen3_5_text": 1, "qwen3_5_moe_text": 3, "qwen2_moe": 2, "qwen4_exp_text": 3, "afmoe": 2},
    ),
    "hyper_pre": Kind(
        ["deepseek_v4", "hy_v4"], of("connection"), ("hyper_pre", ""), ("", "hyper_pre is switched off"),
        ("deepseek_v4",), options={"hc_mult": 4}, compiled=("deepseek_v4", "model.layers.0.attn_hc"),
    ),
    "hyper_post": Kind(
        ["deepseek_v4", "hy_v4", "qwen4_exp_text"], of("layer"), ("hyper_post", ""), ("", "hyper_post is switched off"),
        ("deepseek_v4",), calls=2, options={"hc_mult": 4},
    ),
    "rope of latent heads": Kind(
        ["deepseek_v3", "deepseek_v32", "hy_v4"], of("rope"), ("rope", ""), ("", "rope is switched off"),
        ("deepseek_v3",), "rope", None, ("rope",), compiled=("deepseek_v3", ATTENTION),
    ),
    "xielu": Kind(
        ["apertus"], of("activation"), ("xielu", ""), ("", "xielu is switched off"), ("apertus",),
        compiled=("apertus", "model.layers.0.mlp"),
    ),
}  # fmt: skip
CASES = [
    pytest.param(kind, name, marks=[pytest.mark.thorough] * (name not in row.quick))
    for kind, row in KINDS.items()
    for name in known(row.models)
]


def made(kind, name):
    model = tiny(name, **({} if name == "qwen4_exp_text" else KINDS[kind].options))
    model.config.use_cache = KINDS[kind].cached
    return model


def alone(kind):
    """Options with which nothing else is patched."""
    return {name: name in (KINDS[kind].switches or (kind,)) for name in SWITCHES}


def rows_of(kind, report):
    return [(row.replacement, row.reason) for row in report.rows if KINDS[kind].rows(row)]


def calls(kind, model, **arguments):
    return calls_of(KINDS[kind].operator or kind, model, tokens(), **arguments)


def check_calls(kind, name, model, rows):
    wanted, count = KINDS[kind].calls, calls(kind, model)
    assert count == (wanted[name] if isinstance(wanted, dict) else wanted * len(rows)) if wanted else count


@pytest.mark.parametrize("kind, name", CASES)
def test_training_and_generation(kind, name):
    model, found = made(kind, name), KINDS[kind].found

    def check(report):
        rows = rows_of(kind, report)
        assert set(rows) <= {found if isinstance(found, tuple) else found.get(name, found.get(""))}
        for training in (True, False):
            with path_taken("cpu"):
                check_calls(kind, name, model.train(training), rows)
        # In generation the convolution of new rows alone runs.
        assert KINDS[kind].cached or not calls(kind, model, use_cache=True)
        model.train()
        assert rows or name in ("afmoe", "qwen3_5_text")  # with gates of attention alone
        return len(rows) or 1

    assert_trains_and_generates(model, tokens(), check, **alone(kind))
    assert not calls(kind, model)


# Every second kind in the quick tier.
FIRST = [
    pytest.param(kind, row.quick[0], marks=[pytest.mark.thorough] * (i % 2))
    for i, (kind, row) in enumerate(KINDS.items())
    if known(row.quick[:1])
]
COMPILED = [
    pytest.param(kind, marks=[pytest.mark.thorough] * (i % 2 == 0))
    for i, (kind, row) in enumerate(KINDS.items())
    if row.compiled and known(row.compiled[:1])
]


@pytest.mark.parametrize("kind, name", FIRST)
def test_copies_pickles_and_checkpoints(kind, name):
    """With everything else patched."""
    model, ids = made(kind, name), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    count = calls(kind, model)
    for other, reentrant in ((copy.deepcopy(model), False), (through_pickle(model), True), (model, True)):
        assert calls(kind, other) == count > 0
        other.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same_step(other, ids, plain)
    assert unpatch(model) and not calls(kind, model)


@pytest.mark.parametrize("kind, name", FIRST)
def test_the_switch(kind, name):
    model = made(kind, name)
    report = apply_liger_kernel(model, **{(*KINDS[kind].switches, kind)[0]: False})
    assert set(rows_of(kind, report)) == {KINDS[kind].off}
    assert not calls(kind, model)


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled(kind):
    name, path = KINDS[kind].compiled
    model, ids = made(kind, name), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model, **alone(kind))
    model.get_submodule(path).compile(backend="aot_eager", fullgraph=True)
    assert_same_step(model, ids, plain)


QUICK = ("qwen3_next", "kimi_linear", "mamba2", "falcon_h1", "hy_v4", "deepseek_v32")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK)) for name in known(TINY)]
)
def test_a_step_with_everything_patched(name):
    model, ids = tiny(name), tokens()
    plain = step(model, ids)
    text = model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False)
    report = apply_liger_kernel(model.train())
    for kind, row in KINDS.items():
        if name in row.models and row.cached:
            check_calls(kind, name, model, rows_of(kind, report))
    assert_same_step(model, ids, plain)
    assert torch.equal(model.eval().generate(ids[:1], max_new_tokens=6, do_sample=False), text)
