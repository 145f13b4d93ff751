"""The gates of the delta rule in Gated DeltaNets run in delta_gates."""

import pytest
import torch
from torch.nn import functional

from liger_ops.transformers import apply_liger_kernel, delta_rule
from tests.support.checks import assert_no_worse, path_taken
from tests.support.models.language_models import step, tokens
from tests.support.models.patched_models import assert_same_step, calls_of
from tests.support.models.tiny_models import tiny


def test_a_doubled_step_is_kept():
    """OlmoHybrid may double beta between the two statements."""
    model, ids = tiny("olmo_hybrid"), tokens()
    for module in model.modules():
        if hasattr(module, "allow_neg_eigval"):
            module.allow_neg_eigval = True
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert calls_of("delta_gates", model, ids)
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
