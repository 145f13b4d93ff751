"""Layers with hyper-connections add the output of a block to their streams by hyper_post."""

import copy
import importlib
import importlib.util
from functools import partial

import pytest
import torch
from checks import assert_no_worse, path_taken
from deepseek_models import model_of
from language_models import known, step, tokens
from patched_models import assert_as_exact, assert_same_step, assert_trains_and_generates, calls_of, through_pickle
from rewriting import function
from torch import nn

from liger_ops.transformers import apply_liger_kernel, hyper_connections, hyper_layers, unpatch
from liger_ops.transformers.patch import SWITCHES

calls = partial(calls_of, "hyper_post")
ONLY = {name: name == "hyper_post" for name in SWITCHES}
LAYERS = {
    "deepseek_v4": "DeepseekV4DecoderLayer",
    "hy_v4": "HYV4DecoderLayer",
    "hy_v4_vl": "HYV4VLDecoderLayer",
    "glm5_next": "Glm5NextTextDecoderLayer",
}
LAYERS = {name: cls for name, cls in LAYERS.items() if importlib.util.find_spec(f"transformers.models.{name}")}
SHAPES = {"y": (2, 3, 24), "streams": (2, 3, 4, 24), "post": (2, 3, 4), "comb": (2, 3, 4, 4)}
MODELS = known(["deepseek_v4", "hy_v4"])


def rows_of(report):
    return [(row.type, row.replacement, row.reason) for row in report.rows if row.kind == "layer"]


@pytest.mark.parametrize("name", MODELS)
def test_training_and_generation(name):
    """Four streams, which have kernels."""
    model, ids = model_of(name, hc_mult=4), tokens()

    def check(report):
        rows = rows_of(report)
        assert rows == [(LAYERS[name], "hyper_post", "")] * 2
        with path_taken("cpu"):
            assert calls(model, ids) == 2 * len(rows)
        return len(rows)

    assert_trains_and_generates(model, ids, check, **ONLY)
    assert not calls(model, ids)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_beside_other_operators(name, reentrant):
    model, ids = model_of(name, hc_mult=4), tokens()
    plain = step(model, ids)
    apply_liger_kernel(model)
    for other in (model, copy.deepcopy(model), through_pickle(model)):
        assert calls(other, ids) == 4
        other.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert_same_step(other, ids, plain)
    assert unpatch(model) and not calls(model, ids)


def test_the_switch():
    model, ids = model_of("deepseek_v4", hc_mult=4), tokens()
    report = apply_liger_kernel(model, hyper_post=False)
    assert set(rows_of(report)) == {(LAYERS["deepseek_v4"], "", "hyper_post is switched off")}
    assert not calls(model, ids)


# ---- Layers


class Block(nn.Module):
    """As attention, which may return more than its output, or as an MLP."""

    def __init__(self, results):
        super().__init__()
        self.linear, self.results = nn.Linear(24, 24, bias=False), results

    def forward(self, hidden_states, **arguments):
        y = self.linear(hidden_states)
        return (y, *[None] * (self.results - 1)) if self.results > 1 else y


def layer_of(name):
    """The class's own forward and connections, around small blocks."""
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    cls = getattr(source, LAYERS[name])
    config = type("Config", (), dict(hidden_size=24, hc_mult=4, hc_sinkhorn_iters=3, hc_eps=1e-6, hc_magnitude=2.0))()
    config.rms_norm_eps = 1e-5
    torch.manual_seed(0)
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.block_type = "full_attention"
    connection = next(v for n, v in vars(source).items() if n.endswith("HyperConnection"))
    layer.attn_hc, layer.ffn_hc = connection(config), connection(config)
    layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity()
    layer.self_attn, layer.mlp = Block(2 if name == "deepseek_v4" else 3), Block(1)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, dtype):
    layer = layer_of(name)
    for block in (layer.self_attn, layer.mlp):
        block.to(dtype)
    streams, dout = torch.randn(2, 5, 4, 24).to(dtype), torch.randn(2, 5, 4, 24)

    def run():
        x = streams.clone().requires_grad_()
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(dout.to(dtype))
        found = [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        layer.zero_grad()
        return [[t] for t in found]

    theirs = run()
    holder = nn.ModuleList([layer])
    report = apply_liger_kernel(holder, **ONLY)
    assert rows_of(report) == [(LAYERS[name], "hyper_post", "")]
    with path_taken("cpu"):
        assert_as_exact(run, theirs, layer, dtype=dtype)
    assert unpatch(holder) == 1
    assert all(torch.equal(a, b) for (a,), (b,) in zip(run(), theirs))


@pytest.mark.parametrize("name", LAYERS)
def test_compiled(name):
    layer, x = layer_of(name), torch.randn(2, 5, 4, 24, requires_grad=True)
    holder = nn.ModuleList([layer])
    apply_liger_kernel(holder, **ONLY)

    def run(called):
        out = called(x)
        out = out[0] if isinstance(out, tuple) else out
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    plain = run(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(run(compiled), plain)


def test_a_layer_that_adds_otherwise_is_left_alone():
    layer = layer_of("deepseek_v4")
    cls = type(layer)
    layer.__class__ = type(cls.__name__, (cls,), {"forward": lambda self, x: x + self.attn_hc(x)[0].unsqueeze(-1)})
    report = apply_liger_kernel(nn.ModuleList([layer]), **ONLY)
    (row,) = rows_of(report)
    assert row[1:] == ("", "adds to its streams by no expression that computes hyper_post")


def test_heads_are_no_layers():
    model = model_of("deepseek_v4", hc_mult=4)
    found = {name for name, module in model.named_modules() if hyper_layers.has_connections(module)}
    assert found == {"model.layers.0", "model.layers.1"}
    assert any(map(hyper_connections.looks_like_connection, model.model.children()))


# ---- Arguments


def given(dtype=torch.float32, **changed):
    torch.manual_seed(0)
    made = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    made |= {name: made[name].to(dtype) for name in ("y", "streams")}
    return {**made, "dtype": dtype, **changed}


def theirs_of(y, streams, post, comb, dtype):
    """With fp64, the oracle."""
    if comb is None:
        wide = torch.promote_types(dtype, torch.float32)
        return (post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(-2) + streams.to(wide)).to(dtype)
    mixed = torch.matmul(comb.to(dtype).transpose(-1, -2), streams)
    return post.to(dtype).unsqueeze(-1) * y.unsqueeze(-2) + mixed


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers(dtype, mixed):
    arguments = [t for t in given(dtype).values() if isinstance(t, torch.Tensor)][: 3 + mixed]
    dout = torch.randn(2, 3, 4, 24).to(dtype)

    def run(formula, wide=None):
        leaves = [t.to(wide or t.dtype).requires_grad_() for t in arguments]
        out = formula(*leaves, *[None] * (4 - len(leaves)))
        return out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))

    with path_taken("cpu"):
        ours = run(hyper_layers.hyper_post if mixed else hyper_layers.exact_hyper_post)
    eager, exact = run(partial(theirs_of, dtype=dtype)), run(partial(theirs_of, dtype=torch.float64), torch.float64)
    for name, *tensors in zip(("out", *SHAPES), ours, eager, exact):
        # Sums of 5 products, or of 24, are rounded in any order.
        terms = 24 if name in ("post", "comb") else 5
        assert_no_worse(name, *tensors, noise=terms * torch.finfo(torch.float32).eps)


REFUSED = {
    "fp64": given(torch.float64),
    "another dtype": given(dtype=torch.bfloat16) | {"dtype": torch.float32},
    "a wider output": given(y=torch.randn(2, 3, 24).double()),
    "numbers in half precision": given(post=torch.randn(2, 3, 4).bfloat16()),
    "one post for all tokens": given(post=torch.randn(4)),
    "one comb for all tokens": given(comb=torch.randn(4, 4)),
    "broadcast streams": given(streams=torch.randn(1, 1, 4, 24)),
    "no tensor": given(y=1.0),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_arguments(kind):
    assert hyper_layers.takes(**given()) and hyper_layers.takes(**given(torch.bfloat16))
    assert not hyper_layers.takes(**REFUSED[kind])


def test_autocast():
    """It computes the product of comb and streams in half precision."""
    with torch.autocast("cpu", torch.bfloat16):
        assert not hyper_layers.takes(**given())
        arguments = given(comb=None, y=torch.randn(2, 3, 24).bfloat16())
        assert hyper_layers.takes(**arguments)
        y, streams, post, comb, _ = arguments.values()
        ours = hyper_layers.exact_hyper_post(y, streams, post, comb)
    torch.testing.assert_close(ours, post.unsqueeze(-1) * y.float().unsqueeze(-2) + streams)


# ---- Expressions

PLUS_MIXED = "torch.matmul(c.transpose(-1, -2), s)"
UNDERSTOOD = {
    f"return p.unsqueeze(-1) * y.unsqueeze(-2) + {PLUS_MIXED}": True,
    "h = s + y.unsqueeze(-2) * p.unsqueeze(-1)": True,
    "h = (p.unsqueeze(-1) * y.unsqueeze(-2).float() + s.float()).to(s.dtype)": False,
    "h = (c.mT @ s.float() + p.unsqueeze(-1) * y.float().unsqueeze(-2)).type_as(s)": False,
}
KEPT = [
    f"h = p.unsqueeze(-1) * y.unsqueeze(-2) - {PLUS_MIXED}",
    "h = p.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(c, s)",  # adds by rows of comb
    "h = p.unsqueeze(-1) * y.unsqueeze(-2).detach() + s",
    "h = (p.unsqueeze(-1) * y.unsqueeze(-2) + s).detach()",
    "h = (p.unsqueeze(-1) * y.unsqueeze(-2) + s).double()",
    "h = 2 * p.unsqueeze(-1) * y.unsqueeze(-2) + s",
    "h = p.unsqueeze(-1) * y.unsqueeze(-2) + s.add_(1)",
    "h = p.unsqueeze(-1) * y.unsqueeze(-2) + self.s",
    "h = p.unsqueeze(-1) * (y := x).unsqueeze(-2) + s",
    "h += p.unsqueeze(-1) * y.unsqueeze(-2) + s",
]
BODY = "p, y, s, c = x\nfor i in x:\n    {}"


def rewritten(text):
    method, _ = function(BODY.format(text.replace("p.uns", "p.to(y.dtype).uns").replace("(c.tr", "(c.to(s.dtype).tr")))
    return hyper_layers.with_mixtures(method)


@pytest.mark.parametrize("text", UNDERSTOOD)
def test_expressions(text):
    code = rewritten(text)
    called = {name for name in code.co_names if name.startswith("liger")}
    assert called == {hyper_layers.TAKES, hyper_layers.CALL if UNDERSTOOD[text] else hyper_layers.EXACT}


@pytest.mark.parametrize("text", KEPT)
def test_other_expressions_stay(text):
    assert rewritten(text) is None
