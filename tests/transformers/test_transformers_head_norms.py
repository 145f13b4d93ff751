"""Patched attention: norms of heads and the rotation that follows become qk_norm_rope, and nothing else changes."""

import inspect

import pytest
import torch

from liger_ops.transformers import apply_liger_kernel, head_norms, rewrite, unpatch
from tests.support.checks import assert_no_worse_overall
from tests.support.models.language_models import make, nodes, step, tokens
from tests.support.models.patched_models import assert_same_step

FUSED = ["qwen3", "qwen3_moe", "gemma3_text", "glm4_moe", "exaone4"]


def rotary_rows(report):
    return {(row.replacement, row.reason) for row in report.rows if row.kind == "rope"}


def graph_of(model):
    return nodes(model(input_ids=tokens(), labels=tokens()).loss)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("as_large_models")
def test_attention_calls_the_operator(name):
    model, ids = make(name), tokens()
    plain = step(model, ids)
    assert rotary_rows(apply_liger_kernel(model)) == {("qk_norm_rope", "")}
    names = graph_of(model)
    assert {"qk_norm_rope", "_ProjectionsBackward"} <= names and "rope" not in names
    assert_same_step(model, ids, plain)
    assert rotary_rows(apply_liger_kernel(model)) == {("qk_norm_rope", "")}
    unpatch(model)
    assert "qk_norm_rope" not in graph_of(model)


LEFT_ALONE = {
    "olmo2": "no qk_norm_rope: query_states changes between q_norm and the rotation",
    "hunyuan_v1_dense": "no qk_norm_rope: query_layernorm follows the rotation",
    "llama": "",
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_attention_is_reported(name, monkeypatch):
    monkeypatch.setitem(make.__globals__["ARCHITECTURES"], "hunyuan_v1_dense", {})
    model, ids = make(name), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model)
    assert rotary_rows(report) == {("rope", LEFT_ALONE[name])} and LEFT_ALONE[name] in str(report)
    assert "qk_norm_rope" not in graph_of(model)
    assert_same_step(model, ids, plain)


def test_switches_separate_norm_and_rotation():
    model, ids = make("qwen3"), tokens()
    plain = step(model, ids)
    report = apply_liger_kernel(model, rms_norm=False)
    assert rotary_rows(report) == {("rope", "no qk_norm_rope: q_norm stays, because rms_norm is switched off")}
    assert_same_step(model, ids, plain)
    unpatch(model)
    assert rotary_rows(apply_liger_kernel(model, rope=False)) == {("", "rope is switched off")}
    assert_same_step(model, ids, plain)


def test_hooked_norms_are_called():
    model, ids, shapes = make("qwen3"), tokens(), []
    plain = step(model, ids)
    before, later = (model.model.layers[i].self_attn for i in (0, 1))
    before.q_norm.register_forward_hook(lambda m, i, o: shapes.append(o.shape))
    report = apply_liger_kernel(model)
    assert rotary_rows(report) == {("rope", "no qk_norm_rope: q_norm is hooked or wrapped"), ("qk_norm_rope", "")}
    handle = later.k_norm.register_full_backward_hook(lambda m, i, o: shapes.append(o[0].shape))
    step(model, ids)
    # The shapes of the unpatched model: (batch, sequence, heads, head size).
    assert sorted(shapes) == [(2, 12, 2, 8), (2, 12, 4, 8)]
    assert_same_step(model, ids, plain)
    handle.remove()
    assert "qk_norm_rope" in graph_of(model)


def test_norms_of_two_kinds_are_applied_separately():
    model, ids = make("qwen3"), tokens()
    for layer in model.model.layers:
        layer.self_attn.q_norm.variance_epsilon = 0.5
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert "qk_norm_rope" not in graph_of(model)
    assert_same_step(model, ids, plain)


def test_frozen_norms_and_absent_weights():
    model, ids = make("qwen3"), tokens()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_norm" not in name)
    plain = step(model, ids)
    apply_liger_kernel(model)
    assert "qk_norm_rope" in graph_of(model)
    assert_same_step(model, ids, plain)


def test_autocast_with_weights_in_fp32():
    model, ids = make("qwen3"), tokens()
    exact = step(model, ids)

    def losses(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        return loss.detach(), gradients, nodes(loss)

    truth = torch.cat([g.flatten() for g in exact[1].values()])
    eager = losses(model)
    apply_liger_kernel(model)
    ours = losses(model)
    assert "qk_norm_rope" in ours[2]
    torch.testing.assert_close(ours[0], eager[0], rtol=2e-2, atol=0)
    assert_no_worse_overall([ours[1]], [eager[1]], [truth])


def test_calls_that_the_rotation_does_not_take():
    """Norms are applied before the original function runs, and before a promotion of q and k."""
    model = make("qwen3")
    attention = model.model.layers[0].self_attn
    apply_liger_kernel(model)
    # transformers wraps the method in some releases.
    rotate = inspect.unwrap(type(attention).forward).__globals__["apply_rotary_pos_emb"]
    norms = attention.q_norm, attention.k_norm
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    cos, sin = (t.repeat(1, 1, 2) for t in torch.randn(2, 1, 5, 4))
    expected = rotate(norms[0](q), norms[1](k), cos, sin)
    for arguments in ((cos, sin), (cos, sin, 1), (cos.expand(2, -1, -1), sin.expand(2, -1, -1))):
        ours = head_norms.norm_and_rotate(rotate, norms, q, k, *arguments)
        torch.testing.assert_close(ours, expected)
    partly = head_norms.norm_and_rotate(rotate, (None, norms[1]), norms[0](q), k, cos, sin)
    torch.testing.assert_close(partly, expected)
    halves = [t.bfloat16() for t in (q, k)]
    model.to(torch.bfloat16)
    promoted = head_norms.norm_and_rotate(rotate, norms, *halves, cos, sin)
    assert all(t.dtype == torch.float32 for t in promoted)
    assert rewrite.bare_rms_norm(norms[0], q) is None and head_norms.delay_norm(norms[0], q)[1] is None
