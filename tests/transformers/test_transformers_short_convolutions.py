"""Convolutions between two gates, whose statements run in short_conv."""

import copy
import importlib
from functools import partial

import pytest
import torch
from hybrid_models import (
    ALONE,
    NO_CACHE,
    WITH_CONVOLUTIONS,
    check_convolutions_train_and_generate,
    hybrid,
    without_cache,
)
from language_models import known, step, tokens
from patched_models import assert_same_step, calls_of, through_pickle

from liger_ops import functional as F
from liger_ops.transformers import apply_liger_kernel, convolutions, rewrite, short_convolutions

calls = partial(calls_of, "short_conv")
MODELS = known({name: WITH_CONVOLUTIONS[name] for name in ("lfm2", "lfm2_moe", "lfm3")})
IN_TIERS = [pytest.param(name, marks=[pytest.mark.thorough] * (name != "lfm2")) for name in MODELS]
LENGTHS = [5, 1, 2, 4]


def mixer_of(model):
    (mixer,) = (m for m in model.modules() if convolutions.looks_convolving(m))
    return mixer


@pytest.mark.parametrize("name", IN_TIERS)
def test_training_and_generation(name):
    check_convolutions_train_and_generate(name, "short_conv", 1)


@pytest.mark.parametrize("width", [3, 7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_widths_and_biases(width, with_bias):
    config = copy.deepcopy(hybrid("lfm2").config)
    config.conv_L_cache, config.conv_bias = width, with_bias
    torch.manual_seed(0)
    model, ids = type(hybrid("lfm2"))(config).train(), tokens()
    plain = step(model, ids, **NO_CACHE)
    apply_liger_kernel(model, **ALONE)
    assert calls(model, ids, **NO_CACHE) == 1
    assert_same_step(model, ids, plain, **NO_CACHE)


def test_half_precision_and_autocast():
    """Rounded where the model rounds: results differ in the last digit at most where sums have another order."""
    ids = tokens()
    for dtype, cast in ((torch.bfloat16, False), (torch.float32, True)):
        model = without_cache("lfm2").to(dtype)
        mixer, rows = mixer_of(model), torch.randn(2, 12, model.config.hidden_size, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            plain = mixer(rows)
            apply_liger_kernel(model, **ALONE)
            found = mixer(rows)
            assert calls(model, ids)
        assert found.dtype == plain.dtype == torch.bfloat16
        torch.testing.assert_close(found, plain, atol=2**-7 * plain.detach().abs().max().item(), rtol=0)


def test_everything_patched_copies_pickles_and_checkpoints():
    model, ids = hybrid("lfm2"), tokens()
    plain = step(model, ids, **NO_CACHE)
    apply_liger_kernel(model)
    for other in (model, copy.deepcopy(model), through_pickle(model)):
        assert calls(other, ids, **NO_CACHE) == 1
        for reentrant in (False, True):
            other.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert_same_step(other, ids, plain, **NO_CACHE)


@pytest.mark.parametrize("name", IN_TIERS)
def test_packed_samples_are_those_alone(name):
    model = without_cache(name).eval()
    apply_liger_kernel(model, **ALONE)
    ids = tokens(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits.split(LENGTHS, 1)
        alone = [model(part).logits for part in ids.split(LENGTHS, 1)]
    for found, expected in zip(packed, alone):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_operator_gets_the_projection(monkeypatch):
    model, ids, seen, operator = without_cache("lfm2"), tokens(), [], F.short_conv
    apply_liger_kernel(model, **ALONE)
    monkeypatch.setattr(F, "short_conv", lambda *a, **k: (seen.append(a[0]), operator(*a, **k))[1])
    model(ids)
    (rows,) = seen
    assert rows.is_contiguous() and rows.shape == (*ids.shape, 3 * model.config.hidden_size)


def test_what_the_operator_does_not_take_runs_the_original_statements():
    model, ids = without_cache("lfm2"), tokens()
    mixer = mixer_of(model)
    # The model's function computes in the weight's dtype, which the operator for one convolution gets.
    mixer.conv.double()
    plain = step(model, ids)
    apply_liger_kernel(model, **ALONE)
    assert not calls(model, ids) and calls_of("causal_conv1d", model, ids) == 1
    assert_same_step(model, ids, plain)
    mixer.conv.float()
    assert calls(model, ids) == 1


# ---- The statements

SOURCE = """
import torch

def causal_conv1d_fn(x, weight, bias=None, activation=None, **kwargs):
    ...

def plain(self, h, cache):
    rows = self.in_proj(h).transpose(-1, -2)
    b, c, x = rows.chunk(3, dim=-2)
    h = b * x
    state = None if cache is None else cache.state
    if state is not None and cache.ready:
        h = self.update(h)
    else:
        if cache is not None:
            h = cache.update(h)
        h = causal_conv1d_fn(h, self.weight)
    y = c * h
    y = y.transpose(-1, -2).contiguous()
    y = self.out_proj(y)
    return y
"""
CHANGES = {
    "another axis": ("rows = self.in_proj(h).transpose(-1, -2)", "rows = self.in_proj(h).transpose(-1, 0)"),
    "another order": ("b, c, x = ", "b, x, c = "),
    "two parts": ("rows.chunk(3", "rows.chunk(2"),
    "another dimension": ("dim=-2", "dim=-1"),
    "a sum": ("h = b * x", "h = b + x"),
    "another gate": ("y = c * h", "y = b * h"),
    "no cache": ("        if cache is not None:\n            h = cache.update(h)\n", ""),
    "used besides": ("self.weight)", "self.weight, h)"),
    "part of a condition": ("and cache.ready", "and b.any()"),
    "changed before": ("    state = None", "    c = c + 1\n    state = None"),
    "another function": ("= causal_conv1d_fn", "= other_fn"),
    "not turned": ("y = y.transpose(-1, -2).contiguous()", "y = y.transpose(0, 1).contiguous()"),
    "read later": ("return y", "return y, x"),
}


@pytest.mark.parametrize("case", [None, *CHANGES])
def test_only_these_statements(case, tmp_path, monkeypatch):
    source = SOURCE
    if case is not None:
        assert CHANGES[case][0] in source
        source = source.replace(*CHANGES[case])
    name = f"written_short_{[None, *CHANGES].index(case)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module(name).plain
    change = short_convolutions.with_short(function, frozenset({"causal_conv1d_fn"}))
    assert (change is not None and rewrite.rewritten(function, change) is not None) == (case is None)
