"""Delta nets whose convolution, with the statements around it, runs in causal_conv1d_split."""

import copy
import importlib
from functools import partial

import pytest
import torch
from hybrid_models import ALONE, GATED, NO_CACHE, check_convolutions_train_and_generate, hybrid, without_cache
from language_models import known, step, tokens
from patched_models import assert_same_step, calls_of, through_pickle

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel, convolutions, rewrite, split_convolutions

calls = partial(calls_of, "causal_conv1d_split")
ALTERNATING = ("qwen3_next",)  # by heads, in one projection
SEPARATE = ("qwen3_5_text", "qwen3_5_moe_text", "lara_mini", "qwen4_exp_text")  # z has its own projection
JOINED = ("olmo_hybrid", "kimi_linear", "bailing_hybrid")  # of three projections
QUICK = ("qwen3_next", "qwen3_5_text", "kimi_linear")
IN_TIERS = [
    pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK))
    for name in known({name: GATED[name] for name in (*ALTERNATING, *SEPARATE, *JOINED)})
]
POSITIONS = torch.tensor([[*range(5), 0, *range(2), *range(4)]])


@pytest.mark.parametrize("name", IN_TIERS)
def test_training_and_generation(name):
    check_convolutions_train_and_generate(name, "causal_conv1d_split")


@pytest.mark.parametrize("heads", [(2, 4), (2, 2), (1, 4)])
def test_heads_of_qwen3_next(heads):
    """Of keys and of values: with one value head for each key head, z stays a view."""
    model = hybrid("qwen3_next")
    config = copy.deepcopy(model.config)
    config.linear_num_key_heads, config.linear_num_value_heads = heads
    torch.manual_seed(0)
    model, ids = type(model)(config).train(), tokens()
    plain = step(model, ids, **NO_CACHE)
    apply_liger_kernel(model, **ALONE)
    assert calls(model, ids, **NO_CACHE) == 1
    assert_same_step(model, ids, plain, **NO_CACHE)


@pytest.mark.parametrize("name", known(["qwen3_next", "kimi_linear"]))
def test_no_columns_are_copied_before_the_convolution(name, monkeypatch):
    """In Qwen3-Next the operator gets the projection, elsewhere what the model joined."""
    model, ids, seen, operator = without_cache(name), tokens(), [], F.causal_conv1d_split
    apply_liger_kernel(model, **ALONE)
    monkeypatch.setattr(F, "causal_conv1d_split", lambda *a, **k: (seen.append((a[0], k)), operator(*a, **k))[1])
    model(ids)
    ((x, options),) = seen
    assert options["groups"] == (2 if name == "qwen3_next" else 1)
    assert len(options["sizes"]) == (4 if name == "qwen3_next" else 3)
    assert x.grad_fn.name() == ("CatBackward0" if name == "kimi_linear" else "UnsafeViewBackward0") or x.is_contiguous()


def test_everything_patched_copies_pickles_and_checkpoints():
    model, ids = hybrid("qwen3_next"), tokens()
    plain = step(model, ids, **NO_CACHE)
    report = apply_liger_kernel(model)
    assert {row.replacement for row in report.rows if row.kind == "conv"} == {"causal_conv1d_split and delta_gates"}
    for other in (model, copy.deepcopy(model), through_pickle(model)):
        assert calls(other, ids, **NO_CACHE) == 1
        for reentrant in (False, True):
            other.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert_same_step(other, ids, plain, **NO_CACHE)


def test_packed_samples():
    """Rows of other samples are not convolved."""
    model, ids, seen, operator = without_cache("qwen3_next"), tokens(1, 12), [], F.causal_conv1d_split
    apply_liger_kernel(model, **ALONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "causal_conv1d_split", lambda *a, **k: (seen.append(k["seq_idx"]), operator(*a, **k))[1])
        model(ids, position_ids=POSITIONS)
    assert [t.tolist() for t in seen] == [[[0] * 5 + [1] + [2] * 2 + [3] * 4]]


def test_what_the_operator_does_not_take_runs_the_original_statements():
    model, ids = without_cache("qwen3_5_text"), tokens()
    (mixer,) = (m for m in model.modules() if convolutions.looks_convolving(m))
    # The model's function computes in the weight's dtype, which the operator for one convolution gets.
    mixer.conv1d.double()
    plain = step(model, ids)
    apply_liger_kernel(model, **ALONE)
    assert not calls(model, ids) and calls_of("causal_conv1d", model, ids) == 1
    assert_same_step(model, ids, plain)
    mixer.conv1d.float()
    assert calls(model, ids) == 1
    mixer.key_dim += 8
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        model(ids)


def test_a_projection_in_another_order_is_left_to_the_model():
    """The columns are concatenated as before then, and the operator splits them."""
    model, ids = without_cache("qwen3_next"), tokens()
    (mixer,) = (m for m in model.modules() if convolutions.looks_convolving(m))
    cls = type(mixer)

    class Turned(cls):
        def fix_query_key_value_ordering(self, mixed_qkvz, mixed_ba):
            return super().fix_query_key_value_ordering(mixed_qkvz.flip(-1), mixed_ba)

    mixer.__class__ = Turned
    function = Turned.forward
    assert split_convolutions.layouts_of(mixer, function) == ()
    plain = step(model, ids)
    apply_liger_kernel(model, **ALONE)
    assert calls(model, ids) == 1
    assert_same_step(model, ids, plain)


# ---- The statements

SOURCE = """
import torch

def causal_conv1d_fn(x, weight, bias=None, activation=None, **kwargs):
    ...

def plain(self, mixed, cache, sizes):
    mixed = mixed.transpose(1, 2)
    if cache is not None and cache.ready:
        mixed = self.update(mixed)
    else:
        if cache is not None:
            mixed = cache.update(mixed)
        mixed = causal_conv1d_fn(mixed, self.weight)
    mixed = mixed.transpose(1, 2)
    q, k, v = torch.split(mixed, sizes, dim=-1)
    return q, k, v
"""
CHANGES = {
    "another axis": ("mixed.transpose(1, 2)\n    q", "mixed.transpose(1, 0)\n    q"),
    "read later": ("return q, k, v", "return q, k, v, mixed"),
    "another dimension": ("dim=-1", "dim=-2"),
    "two parts": ("q, k, v = torch", "q, k = torch"),
    "no cache": ("        if cache is not None:\n            mixed = cache.update(mixed)\n", ""),
    "used besides": ("self.weight)", "self.weight, mixed)"),
    "changed before": ("        mixed = causal", "        mixed = mixed + 1\n        mixed = causal"),
    "another function": ("= causal_conv1d_fn", "= other_fn"),
    "another split": ("torch.split", "self.split"),
}


def change_found(tmp_path, monkeypatch, source, name):
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module(name).plain
    change = split_convolutions.with_split(function, frozenset({"causal_conv1d_fn"}), frozenset())
    return change is not None and rewrite.rewritten(function, change) is not None


@pytest.mark.parametrize("case", [None, *CHANGES])
def test_only_these_statements(case, tmp_path, monkeypatch):
    source = SOURCE
    if case is not None:
        assert CHANGES[case][0] in source
        source = source.replace(*CHANGES[case])
    name = f"written_split_{[None, *CHANGES].index(case)}"
    assert change_found(tmp_path, monkeypatch, source, name) == (case is None)
