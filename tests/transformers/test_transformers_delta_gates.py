"""The gates of the delta rule in Gated DeltaNets run in delta_gates."""

import copy
import importlib
from functools import partial

import pytest
import torch
from checks import assert_no_worse, path_taken
from hybrid_models import ALONE, GATED, hybrid
from language_models import known, step, tokens
from patched_models import assert_same_step, assert_trains_and_generates, calls_of, through_pickle
from torch.nn import functional

from liger_ops.transformers import apply_liger_kernel, delta_rule, unpatch

calls = partial(calls_of, "delta_gates")
ONLY = ALONE | {"causal_conv1d": False, "delta_gates": True}
WITH_GATES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini", "qwen4_exp_text")
QUICK = ("qwen3_next", "olmo_hybrid")
IN_TIERS = [
    pytest.param(name, marks=[pytest.mark.thorough] * (name not in QUICK))
    for name in known({name: GATED[name] for name in WITH_GATES})
]


def rows_of(report):
    return [(row.replacement, row.reason) for row in report.rows if row.kind == "conv"]


@pytest.mark.parametrize("name", IN_TIERS)
def test_training_and_generation(name):
    model, ids = hybrid(name), tokens()

    def check(report):
        rows = rows_of(report)
        assert rows and set(rows) == {("delta_gates", "no causal_conv1d: causal_conv1d is switched off")}
        with path_taken("cpu"):
            assert calls(model, ids) == len(rows)
        return len(rows)

    assert_trains_and_generates(model, ids, check, **ONLY)
    assert not calls(model, ids)


@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_the_convolution(reentrant):
    model, ids = hybrid("qwen3_next"), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model, **ALONE | {"delta_gates": True})
    rows = rows_of(report)
    assert set(rows) == {("causal_conv1d_split and delta_gates", "")}
    for other in (model, copy.deepcopy(model), through_pickle(model)):
        assert calls(other, ids) == len(rows)
        other.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same_step(other, ids, plain)
    assert unpatch(model) and not calls(model, ids)


def test_the_switch():
    model, ids = hybrid("qwen3_next"), tokens()
    report = apply_liger_kernel(model, delta_gates=False)
    assert set(rows_of(report)) == {("causal_conv1d_split", "")} and not calls(model, ids)


def test_a_doubled_step_is_kept():
    """OlmoHybrid may double beta between the two statements."""
    model, ids = hybrid("olmo_hybrid"), tokens()
    for module in model.modules():
        if hasattr(module, "allow_neg_eigval"):
            module.allow_neg_eigval = True
    plain = step(model, ids)
    apply_liger_kernel(model, **ONLY)
    assert calls(model, ids)
    assert_same_step(model, ids, plain)


# ---- The function


def theirs(a, b, a_log, dt_bias):
    return -a_log.float().exp() * functional.softplus(a.float() + dt_bias), b.sigmoid()


@pytest.mark.parametrize("weights", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype, weights):
    torch.manual_seed(0)
    a, b = torch.randn(2, 5, 8).to(dtype), torch.randn(2, 5, 8).to(dtype)
    a_log, dt_bias = (torch.randn(8).to(kind) for kind in weights)
    with path_taken("cpu"):
        found = delta_rule.delta_gates(a, b, a_log, dt_bias)
    expected = theirs(a, b, a_log, dt_bias)
    rate, bias = a_log.double().exp(), dt_bias.double()
    exact = -rate * functional.softplus(a.double() + bias), b.double().sigmoid()
    for name, ours, other, truth in zip(("g", "beta"), found, expected, exact):
        assert_no_worse(name, ours, other, truth)


@pytest.mark.parametrize("kind", ["fp64", "another dtype", "one bias for all heads"])
def test_what_is_not_understood_runs_the_original_statements(kind, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(delta_rule.F, "delta_gates", None)
    a, b, a_log, dt_bias = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8), torch.randn(8)
    if kind == "fp64":
        a, b = a.double(), b.double()
    if kind == "another dtype":
        b = b.bfloat16()
    if kind == "one bias for all heads":
        dt_bias = dt_bias[:1]
    for ours, other in zip(delta_rule.delta_gates(a, b, a_log, dt_bias), theirs(a, b, a_log, dt_bias)):
        assert torch.equal(ours, other) and ours.dtype == other.dtype


# ---- The statements

SOURCE = """
import torch
from torch.nn import functional as F

def plain(self, a, b):
    beta = b.sigmoid()
    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
    return g, beta

def reads_beta(self, a, b):
    beta = b.sigmoid()
    g = -self.A_log.float().exp() * F.softplus(beta.float() + self.dt_bias)
    return g, beta

def changes_a(self, a, b):
    beta = b.sigmoid()
    a = a + 1
    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
    return g, beta

def not_negative(self, a, b):
    beta = b.sigmoid()
    g = self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
    return g, beta

def another_slope(self, a, b):
    beta = b.sigmoid()
    g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias, 2)
    return g, beta
"""


def test_only_these_statements(tmp_path, monkeypatch):
    (tmp_path / "written_gates.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("written_gates")
    assert delta_rule.with_gates(module.plain) is not None
    for name in ("reads_beta", "changes_a", "not_negative", "another_slope"):
        assert delta_rule.with_gates(getattr(module, name)) is None, name
