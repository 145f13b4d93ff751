"""liger_ops.transformers.rewrite merges statements of a model's source, and changes nothing else."""

import ast
import linecache

import pytest
import torch
from checks import count_graphs
from language_models import make, nodes, step, tokens
from patched_models import assert_same_step
from rewriting import after, function
from torch import nn

from liger_ops.linear import project
from liger_ops.transformers import apply_liger_kernel, rewrite, unpatch

pytestmark = pytest.mark.usefixtures("as_large_models")


LINEARS, NORMS = frozenset({"q", "k", "v", "o", "gate", "up"}), frozenset({"norm", "last"})


def test_projections_of_one_input_are_called_together():
    body = """
        shape = x.shape
        q = self.q(x).view(shape).transpose(0, 1)
        k, v = self.k(x), self.v(x)
        gate = self.gate(residual)
        up = self.up(residual)
        return self.o(q + k + v) * gate * up
    """
    assert after(rewrite.share_projections, body, LINEARS).splitlines() == [
        "shape = x.shape",
        "liger_q, liger_k, liger_v = liger_project((self.q, self.k, self.v), x)",
        "q = liger_q.view(shape).transpose(0, 1)",
        "k, v = (liger_k, liger_v)",
        "liger_gate, liger_up = liger_project((self.gate, self.up), residual)",
        "gate = liger_gate",
        "up = liger_up",
        "return self.o(q + k + v) * gate * up",
    ]


def test_a_single_projection_is_rewritten():
    """A call whose result replaces its own input counts as well."""
    body = """
        q = self.q(x)
        k = self.k(q)
        x = self.o(k.sum())
        k = self.o(k)
        return k
    """
    assert after(rewrite.share_projections, body, LINEARS).splitlines() == [
        "liger_q, = liger_project((self.q,), x)",
        "q = liger_q",
        "liger_k, = liger_project((self.k,), q)",
        "k = liger_k",
        "x = self.o(k.sum())",
        "liger_o, = liger_project((self.o,), k)",
        "k = liger_o",
        "return k",
    ]


@pytest.mark.parametrize(
    "body",
    [
        "q = self.q(x)\nx = x + 1\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\nfor x in q:\n    pass\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\nk = self.q(x)\nreturn q + k",
        "q = self.q(x, 1)\nk = self.k(x, 1)\nreturn q + k",
        "q = self.other(x)\nreturn q",
        "q = other.q(x)\nk = other.k(x)\nreturn q + k",
        "q = self.q(x)\ndel x\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\nx += 1\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\nx.mul_(2)\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\nx[0] = 2\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\nx.data = q\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\ny = torch.relu_(x)\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\ny = torch.relu(q, out=x)\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\ny = x.mul_(2)\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\n(x := q)\nk = self.k(x)\nreturn q + k",
        "q = self.q(x)\nif residual is None:\n    return q\nk = self.k(x)\nreturn q + k",
        "q = x.mul_(2) + self.q(x)\nreturn q",
        "q = (x := residual) + self.q(x)\nreturn q",
        "q = [self.q(x) for _ in range(2)]\nreturn q[0]",
        "q = residual or self.q(x)\nreturn q",
        "q = lambda: self.q(x)\nreturn q()",
    ],
)
def test_calls_stay_if_their_input_may_change(body):
    assert after(rewrite.share_projections, body, LINEARS) is None


@pytest.mark.parametrize(
    "body",
    [
        "q = self.q(x)\nk = self.k(x) if residual is None else residual\nreturn q + k",
        "q = self.q(x)\nk = residual or self.k(x)\nreturn q + k",
        "q = self.q(x)\nk = [self.k(x) for _ in range(2)]\nreturn q + k[0]",
        "q = self.q(x)\nk = lambda: self.k(x)\nreturn q + k()",
        "q = self.q(x)\nk = self.other(x)\nreturn q + k",
    ],
)
def test_a_conditional_call_stays_in_place(body):
    """Only the unconditional call is rewritten."""
    first, *rest = after(rewrite.share_projections, body, LINEARS).splitlines()
    assert first == "liger_q, = liger_project((self.q,), x)"
    assert rest == ast.unparse(ast.parse(body.replace("self.q(x)", "liger_q"))).splitlines()


def test_calls_in_different_branches_are_not_merged():
    body = "if residual is None:\n    q = self.q(x)\nelse:\n    q = self.k(x)\nreturn q"
    assert after(rewrite.share_projections, body, LINEARS).count("liger_project((self.") == 2


def test_a_residual_addition_merges_with_the_next_norm():
    body = """
        residual = x
        x = self.attention(x)
        x = residual + x * 2
        residual = x
        x = self.norm(x)
        x = residual + self.mlp(x)
        residual = x
        x = self.last(x)
        if x is not None:
            x = self.mlp(x) + residual
            residual = x
            x = self.last(x)
        return residual + x
    """
    assert after(rewrite.fuse_add_norm, body, NORMS).splitlines() == [
        "residual = x",
        "x = self.attention(x)",
        "x, residual = liger_add_norm(self.norm, x * 2, residual)",
        "x, residual = liger_add_norm(self.last, self.mlp(x), residual)",
        "if x is not None:",
        "    x, residual = liger_add_norm(self.last, self.mlp(x), residual)",
        "return residual + x",
    ]


@pytest.mark.parametrize(
    "body",
    [
        "x = residual - x\nresidual = x\nx = self.norm(x)\nreturn x + residual",
        "x = residual + residual\nresidual = x\nx = self.norm(x)\nreturn x + residual",
        "x = residual + x\nx = self.norm(x)\nreturn x",
        "x = residual + x\nresidual = x\ny = self.norm(x)\nreturn y + residual",
        "x = residual + x\nresidual = x\nx = self.other(x)\nreturn x + residual",
        "x = residual + x\nresidual = x\nx = self.norm(residual, x)\nreturn x + residual",
        "x += residual\nresidual = x\nx = self.norm(x)\nreturn x + residual",
    ],
)
def test_other_additions_stay(body):
    assert after(rewrite.fuse_add_norm, body, NORMS) is None


def test_a_norm_also_returns_its_input_as_the_residual():
    body = """
        residual = x
        x = self.norm(x)
        x = self.mlp(x)
        return residual + x
    """
    assert after(rewrite.fuse_norm_and_input, body, NORMS).splitlines() == [
        "x, residual = liger_norm_and_input(self.norm, x)",
        "x = self.mlp(x)",
        "return residual + x",
    ]


@pytest.mark.parametrize(
    "rest",
    [
        "return residual, x",
        "residual += x\nreturn residual + x",
        "residual.add_(x)\nreturn residual + x",
        "return self.mix(residual, x)",
        "return residual * x",
    ],
)
def test_a_residual_with_other_uses_stays(rest):
    assert after(rewrite.fuse_norm_and_input, f"residual = x\nx = self.norm(x)\n{rest}", NORMS) is None


def test_functions_with_missing_or_different_source_stay():
    body = "x = residual + x\nresidual = x\nx = self.norm(x)\nreturn x + residual"
    found, source = function(body)
    assert rewrite.with_fused_norms(found, NORMS) is not None
    edited, source = function(body)
    linecache.cache[edited.__code__.co_filename] = 1, None, source.replace("+ x", "- x").splitlines(True), "edited"
    gone, _ = function(body)
    del linecache.cache[gone.__code__.co_filename]
    assert rewrite.with_fused_norms(edited, NORMS) is rewrite.with_fused_norms(gone, NORMS) is None
    assert rewrite.with_fused_norms(print, NORMS) is None


# ---- In models


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


def test_compiled_layers_contain_the_operator():
    model, ids = make("llama"), tokens()
    apply_liger_kernel(model)
    backend, graphs = count_graphs()
    torch.compile(model.model, fullgraph=True, backend=backend)(input_ids=ids)
    assert sum("fused_add_rms_norm" in str(n.target) for g in graphs for n in g.graph.nodes) == 2


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
