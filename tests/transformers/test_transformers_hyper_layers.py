"""Hyper-connections of transformers' models in hyper_pre. Their layers add the output of a block to their streams by hyper_post."""

import ast
import importlib
import importlib.util
from functools import partial

import pytest
import torch
from torch import nn

from liger_ops.transformers import apply_liger_kernel, hyper_connections, hyper_layers, rewrite, unpatch
from liger_ops.transformers.options import SWITCHES
from tests.support.checks import assert_no_worse, path_taken
from tests.support.models.patched_models import assert_as_exact
from tests.support.models.rewriting import function
from tests.support.models.tiny_models import tiny

ONLY = {name: name == "hyper_post" for name in SWITCHES}
LAYERS = {
    "deepseek_v4": "DeepseekV4DecoderLayer",
    "hy_v4": "HYV4DecoderLayer",
    "hy_v4_vl": "HYV4VLDecoderLayer",
    "glm5_next": "Glm5NextTextDecoderLayer",
    "qwen4_exp": "Qwen4ExpTextDecoderLayer",
}
LAYERS = {name: cls for name, cls in LAYERS.items() if importlib.util.find_spec(f"transformers.models.{name}")}
SHAPES = {"y": (2, 3, 24), "streams": (2, 3, 4, 24), "post": (2, 3, 4), "comb": (2, 3, 4, 4)}


def rows_of(report):
    return [(row.type, row.replacement, row.reason) for row in report.rows if row.kind == "layer"]


# ---- Layers


class Block(nn.Module):
    """As attention, which may return more than its output, or as an MLP."""

    def __init__(self, results):
        super().__init__()
        self.linear, self.results = nn.Linear(24, 24, bias=False), results

    def forward(self, hidden_states, *args, **arguments):
        y = self.linear(hidden_states)
        return (y, *[None] * (self.results - 1)) if self.results > 1 else y


def layer_of(name):
    """The class's own forward and connections, around small blocks."""
    source = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    cls = getattr(source, LAYERS[name])
    config = type("Config", (), dict(hidden_size=24, hc_mult=4, hc_sinkhorn_iters=3, hc_eps=1e-6, hc_magnitude=2.0))()
    config.rms_norm_eps, config.hc_count, config.hc_lowrank = 1e-5, 4, 8
    torch.manual_seed(0)
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    layer.block_type = layer.layer_type = "full_attention"
    names = ("attn_hyper_connection", "mlp_hyper_connection") if name == "qwen4_exp" else ("attn_hc", "ffn_hc")
    connection = next(v for n, v in vars(source).items() if n.endswith(("HyperConnection", "GatedResidual")))
    for child in names:
        setattr(layer, child, connection(config))
    layer.ple = None
    layer.input_layernorm, layer.post_attention_layernorm = nn.Identity(), nn.Identity()
    layer.self_attn, layer.mlp = Block(2 if name in ("deepseek_v4", "qwen4_exp") else 3), Block(1)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


def output_of(layer, name, x):
    """x: (..., 4, n)"""
    if name == "qwen4_exp":
        return layer(x.flatten(-2), None).unflatten(-1, x.shape[-2:])
    out = layer(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, dtype):
    layer = layer_of(name)
    for block in (layer,) if name == "qwen4_exp" else (layer.self_attn, layer.mlp):
        block.to(dtype)
    streams, dout = torch.randn(2, 5, 4, 24).to(dtype), torch.randn(2, 5, 4, 24)

    def run():
        x = streams.clone().requires_grad_()
        out = output_of(layer, name, x)
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


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n not in ("deepseek_v4", "qwen4_exp"))) for n in LAYERS]
)
def test_compiled(name):
    layer, x = layer_of(name), torch.randn(2, 5, 4, 24, requires_grad=True)
    holder = nn.ModuleList([layer])
    apply_liger_kernel(holder, **ONLY)

    def run(called):
        out = output_of(called, name, x)
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
    model = tiny("deepseek_v4")
    found = {name for name, module in model.named_modules() if hyper_layers.has_connections(module)}
    assert found == {"model.layers.0", "model.layers.1"}
    assert any(map(hyper_connections.looks_like_connection, model.model.children()))


# ---- Connections

CLASSES = [
    ("deepseek_v4", "DeepseekV4HyperConnection", "DeepseekV4Config", (1, 2, 0)),
    ("deepseek_v4", "DeepseekV4HyperHead", "DeepseekV4Config", ()),
    ("hy_v4", "HYV4HyperConnection", "HYV4Config", (1, 0)),
    ("hy_v4", "HYV4HyperHead", "HYV4Config", ()),
    ("glm5_next", "Glm5NextTextHyperConnection", "Glm5NextTextConfig", (1, 2, 0)),
]
CLASSES = [row for row in CLASSES if importlib.util.find_spec(f"transformers.models.{row[0]}")]


def connection_of(model_type, cls, config):
    source = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    configuration = importlib.import_module(f"transformers.models.{model_type}.configuration_{model_type}")
    torch.manual_seed(0)
    made = getattr(source, cls)(getattr(configuration, config)(hidden_size=24, hc_mult=4))
    for p in made.parameters():
        nn.init.normal_(p, std=0.3)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type, cls, config, order", CLASSES)
def test_connections(model_type, cls, config, order, dtype):
    model = nn.Sequential(connection_of(model_type, cls, config)).requires_grad_(False)
    streams = torch.randn(2, 5, 4, 24, dtype=dtype)

    def results(x):
        out = model(x)
        return out if isinstance(out, tuple) else (out,)

    exact, theirs = results(streams.float()), results(streams)
    report = apply_liger_kernel(model)
    assert [row.replacement for row in report.rows if row.kind == "connection"] == ["hyper_pre"], str(report)
    with path_taken("cpu"):
        ours = results(streams)
    assert hyper_connections.identify(model[0], dict(hyper_pre=True)).order == order
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # A result in bf16 is rounded once by both.
        eps = torch.finfo(a.dtype).eps
        assert float((a.float() - truth).abs().max()) <= 4 * eps * float(truth.abs().max())


def test_connections_that_compute_something_else_are_left_alone():
    model = nn.Sequential(connection_of(*CLASSES[0][:3]))
    cls = type(model[0])
    other = type(cls.__name__, (cls,), {"forward": lambda self, x: tuple(2 * t for t in cls.forward(self, x))})
    model[0].__class__ = other
    report = apply_liger_kernel(model)
    assert report.rows[0].reason == "computes something else"


def test_connections_under_autocast_run_the_original():
    model, streams = nn.Sequential(connection_of(*CLASSES[0][:3])), torch.randn(2, 5, 4, 24)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(streams)
        apply_liger_kernel(model)
        ours = model(streams)
    assert all(map(torch.equal, ours, theirs))


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
        ours = run(partial(hyper_layers.hyper_post, rounded=mixed))
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
        ours = hyper_layers.hyper_post(y, streams, post, comb, rounded=False)
    torch.testing.assert_close(ours, post.unsqueeze(-1) * y.float().unsqueeze(-2) + streams)


# ---- Expressions

PLUS_MIXED = "torch.matmul(c.to(s.dtype).transpose(-1, -2), s)"
# Whether steps round, streams are beside each other, and numbers have the dtype of streams.
UNDERSTOOD = {
    f"return p.to(s.dtype).unsqueeze(-1) * y.unsqueeze(-2) + {PLUS_MIXED}": (True, False, False),
    "h = s + y.unsqueeze(-2) * p.unsqueeze(-1).to(y.dtype)": (True, False, False),
    "h = s + y.unsqueeze(-2) * p.unsqueeze(-1)": (True, False, True),
    "h = s + (y.unsqueeze(-2) * p.unsqueeze(-1)).flatten(-2)": (True, True, True),
    "h = (p.unsqueeze(-1) * y.unsqueeze(-2).float() + s.float()).to(s.dtype)": (False, False, False),
    "h = (c.mT @ s.float() + p.unsqueeze(-1) * y.float().unsqueeze(-2)).type_as(s)": (False, False, False),
}
KEPT = [
    f"h = p.unsqueeze(-1) * y.unsqueeze(-2) - {PLUS_MIXED}",
    "h = p.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(c.to(s.dtype), s)",  # adds by rows of comb
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
    return hyper_layers.with_mixtures(function(BODY.format(text))[0])


def mixture_in(text):
    method, _ = function(BODY.format(text))
    return hyper_layers.mixture_of(ast.parse(text).body[0].value, method)


@pytest.mark.parametrize("text", UNDERSTOOD)
def test_expressions(text):
    code = rewritten(text)
    assert {name for name in code.co_names if name.startswith("liger")} == {hyper_layers.TAKES, hyper_layers.CALL}
    assert mixture_in(text)[1:] == UNDERSTOOD[text]


@pytest.mark.parametrize("text", KEPT)
def test_other_expressions_stay(text):
    assert rewritten(text) is None


PRODUCT = "t = y.unsqueeze(-2) * p.unsqueeze(-1)"
TWO = f"{PRODUCT}\nh = s + t.flatten(-2)"
IN_TWO = [TWO, f"{TWO}\n{TWO}\nreturn h", TWO.replace("h =", "t ="), f"{TWO}\nt = x"]
READ_AGAIN = [
    f"{TWO}\nreturn t",
    f"{TWO}\nt = t + 1",
    f"{TWO}\nreturn lambda: t",
    f"{TWO}\nif x:\n    t = 1",
    f"{PRODUCT}\nprint(x)\nh = s + t.flatten(-2)",
    f"{PRODUCT}\nh = s + t.flatten(-2) * t.mean()",
]


@pytest.mark.parametrize("text", IN_TWO)
def test_two_statements(text):
    method, source = function("p, y, s = x\n" + text)
    code = hyper_layers.with_mixtures(method)
    assert hyper_layers.CALL in code.co_names
    # The original expression stays, once for each.
    tree = ast.parse(source)
    change = partial(hyper_layers.fuse_mixtures, method)
    assert rewrite.change_all(change, tree.body[0], frozenset())
    assert PRODUCT not in ast.unparse(tree)


@pytest.mark.parametrize("text", READ_AGAIN)
def test_values_that_are_read_again_stay(text):
    assert hyper_layers.with_mixtures(function("p, y, s = x\n" + text)[0]) is None
