"""Layers of models whose residual additions and norms are merged."""

import pytest
import torch
from torch import nn

from liger_ops.linear import project
from liger_ops.transformers import apply_liger_kernel, rewrite, unpatch
from tests.support.models.language_models import make, nodes, step, tokens
from tests.support.models.patched_models import assert_same_step

pytestmark = pytest.mark.usefixtures("as_large_models")


def graph_of(model, ids):
    return nodes(model(input_ids=ids, labels=ids).loss)


def layers_of(report):
    return [row for row in report.replaced if row.kind == "layer"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "granite"])
def test_layers_call_fused_operators(name):
    model, ids = make(name), tokens()
    plain = step(model, ids)
    assert "fused_add_rms_norm" not in graph_of(model, ids)
    report = apply_liger_kernel(model)
    assert len(layers_of(report)) == 2 and {row.replacement for row in layers_of(report)} == {"fused_add_rms_norm"}
    fused_nodes = {"fused_add_rms_norm", "_ProjectionsBackward", "_NormAndInputBackward"}
    assert fused_nodes <= graph_of(model, ids)
    assert_same_step(model, ids, plain)
    unpatch(model)
    assert not fused_nodes & graph_of(model, ids)


def test_without_rms_norm_layers_are_left_alone():
    model = make("llama")
    report = apply_liger_kernel(model, rms_norm=False)
    assert {row.reason for row in report.left_alone if row.kind == "layer"} == {"rms_norm is switched off"}
    assert "fused_add_rms_norm" not in graph_of(model, tokens())


def test_a_hook_on_the_norm_is_called():
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model)
    layer, seen = model.model.layers[0], []
    layer.post_attention_layernorm.register_forward_hook(lambda m, i, o: seen.append((i[0], o)))
    expected = step(make("llama"), ids)
    torch.testing.assert_close(step(model, ids)[0], expected[0])
    ((x, y),) = seen
    torch.testing.assert_close(y, layer.post_attention_layernorm(x))


def test_a_norm_installed_later_is_called():
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    ids, plain, model = tokens(), make("llama"), make("llama")
    apply_liger_kernel(model)
    plain.model.layers[1].post_attention_layernorm = Half()
    model.model.layers[1].post_attention_layernorm = Half()
    torch.testing.assert_close(step(model, ids)[0], step(plain, ids)[0])


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_exported_layers_contain_the_operator(strict):
    model, ids = make("llama").eval(), tokens()
    expected = model(input_ids=ids, use_cache=False).logits
    apply_liger_kernel(model)
    with torch.no_grad():
        program = torch.export.export(model, (ids,), {"use_cache": False}, strict=strict)
    assert sum("fused_add_rms_norm" in str(n.target) for n in program.graph.nodes) == 2
    torch.testing.assert_close(program.module()(ids, use_cache=False).logits, expected)


def test_norms_without_a_weight():
    norm, x = patched_norm(), torch.randn(3, 32, requires_grad=True)
    del norm.weight
    norm.weight = None
    y, residual = rewrite.norm_and_input(norm, x)
    (dx,) = torch.autograd.grad((y * x.detach()).sum() + residual.sum(), x)
    expected = torch.nn.functional.rms_norm(x, (32,), eps=norm.eps)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(dx, torch.autograd.grad((expected * x.detach()).sum() + x.sum(), x)[0])


def test_layers_with_other_norms_are_left_alone():
    """Residual additions come before these norms too, but no operator merges an addition with LayerNorm."""
    model, ids = make("llama"), tokens()
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.LayerNorm(32)
    plain = step(model, ids)
    report = apply_liger_kernel(model)
    assert not [row for row in report.rows if row.kind == "layer"]
    torch.testing.assert_close(step(model, ids)[0], plain[0])


def patched_norm(weight_needs_grad=True):
    model = make("gemma")
    apply_liger_kernel(model)
    return model.model.norm.requires_grad_(weight_needs_grad)


@pytest.mark.parametrize("used", ["both", "norm", "input"])
@pytest.mark.parametrize("frozen", [None, "weight", "input"])
def test_gradients_of_a_norm_and_its_input(used, frozen):
    norm = patched_norm(frozen != "weight")
    x = torch.randn(3, 5, 32, requires_grad=True)
    dy, dx = torch.randn(2, 3, 5, 32)

    def gradients(y, residual):
        parts = [(t, g) for t, g, name in ((y, dy, "norm"), (residual, dx, "input")) if used in ("both", name)]
        wanted = [t for t in (x, norm.weight) if t.requires_grad]
        return torch.autograd.grad([t for t, _ in parts], wanted, [g for _, g in parts], allow_unused=True)

    x.requires_grad_(frozen != "input")
    if frozen == "input":
        assert rewrite.norm_and_input(norm, x)[1] is x
        return
    y, residual = rewrite.norm_and_input(norm, x)
    assert y.grad_fn.name() == "_NormAndInputBackward" and torch.equal(y, norm(x)) and torch.equal(residual, x)
    for ours, plain in zip(gradients(y, residual), gradients(norm(x), x * 1), strict=True):
        assert (ours is None) == (plain is None)
        if ours is not None:
            torch.testing.assert_close(ours, plain)


def test_a_norm_and_its_input_have_no_second_derivative():
    norm, x = patched_norm(), torch.randn(3, 32, requires_grad=True)
    y, residual = rewrite.norm_and_input(norm, x)
    (dx,) = torch.autograd.grad((y + residual).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("mode", ["no grad", "small", "autocast"])
def test_norm_and_input_falls_back_to_the_norm(mode, monkeypatch):
    norm, x = patched_norm(), torch.randn(3, 32, requires_grad=True)
    if mode == "small":
        monkeypatch.setattr(project, "LARGE", x.numel() + 1)
    with torch.set_grad_enabled(mode != "no grad"), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        y, residual = rewrite.norm_and_input(norm, x)
    assert residual is x and (y.grad_fn is None or y.grad_fn.name() != "_NormAndInputBackward")
