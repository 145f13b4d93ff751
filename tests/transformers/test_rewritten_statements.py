"""Statements of a model's source that liger_ops.transformers merges, and those that look like them and must stay."""

import ast
import linecache
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from liger_ops.transformers import delta_rule, head_norms, latent_heads, rewrite, short_convolutions, split_convolutions
from tests.support.models.rewriting import after, function


class Rule(NamedTuple):
    change: Callable  # of a block of statements
    names: frozenset[str]  # of children, or of functions
    rewritten: dict[str, str]
    kept: list[str]


LINEARS, NORMS = frozenset({"q", "k", "v", "o", "gate", "up"}), frozenset({"norm", "last"})
PROJECTIONS = Rule(
    rewrite.share_projections,
    LINEARS,
    {
        """
shape = x.shape
q = self.q(x).view(shape).transpose(0, 1)
k, v = self.k(x), self.v(x)
gate = self.gate(residual)
up = self.up(residual)
return self.o(q + k + v) * gate * up
""": """
shape = x.shape
liger_q, liger_k, liger_v = liger_project((self.q, self.k, self.v), x)
q = liger_q.view(shape).transpose(0, 1)
k, v = (liger_k, liger_v)
liger_gate, liger_up = liger_project((self.gate, self.up), residual)
gate = liger_gate
up = liger_up
return self.o(q + k + v) * gate * up
""",
        # A single one, also if its result replaces its input.
        """
q = self.q(x)
k = self.k(q)
x = self.o(k.sum())
k = self.o(k)
return k
""": """
liger_q, = liger_project((self.q,), x)
q = liger_q
liger_k, = liger_project((self.k,), q)
k = liger_k
x = self.o(k.sum())
liger_o, = liger_project((self.o,), k)
k = liger_o
return k
""",
        # In other branches.
        "if residual is None:\n    q = self.q(x)\nelse:\n    q = self.k(x)\nreturn q": """
if residual is None:
    liger_q, = liger_project((self.q,), x)
    q = liger_q
else:
    liger_k, = liger_project((self.k,), x)
    q = liger_k
return q
""",
        # A conditional call stays in place.
        **{
            f"q = self.q(x)\n{rest}": f"liger_q, = liger_project((self.q,), x)\nq = liger_q\n{rest}"
            for rest in (
                "k = self.k(x) if residual is None else residual\nreturn q + k",
                "k = residual or self.k(x)\nreturn q + k",
                "k = [self.k(x) for _ in range(2)]\nreturn q + k[0]",
                "k = lambda: self.k(x)\nreturn q + k()",
                "k = self.other(x)\nreturn q + k",
            )
        },
    },
    # Their input may change.
    [
        *(
            f"q = self.q(x)\n{between}\nk = self.k(x)\nreturn q + k"
            for between in (
                "x = x + 1",
                "for x in q:\n    pass",
                "del x",
                "x += 1",
                "x.mul_(2)",
                "x[0] = 2",
                "x.data = q",
                "y = torch.relu_(x)",
                "y = torch.relu(q, out=x)",
                "y = x.mul_(2)",
                "(x := q)",
                "if residual is None:\n    return q",
            )
        ),
        "q = self.q(x)\nk = self.q(x)\nreturn q + k",
        "q = self.q(x, 1)\nk = self.k(x, 1)\nreturn q + k",
        "q = self.other(x)\nreturn q",
        "q = other.q(x)\nk = other.k(x)\nreturn q + k",
        "q = x.mul_(2) + self.q(x)\nreturn q",
        "q = (x := residual) + self.q(x)\nreturn q",
        "q = [self.q(x) for _ in range(2)]\nreturn q[0]",
        "q = residual or self.q(x)\nreturn q",
        "q = lambda: self.q(x)\nreturn q()",
    ],
)
ADD_NORM = Rule(
    rewrite.fuse_add_norm,
    NORMS,
    {
        """
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
""": """
residual = x
x = self.attention(x)
x, residual = liger_add_norm(self.norm, x * 2, residual)
x, residual = liger_add_norm(self.last, self.mlp(x), residual)
if x is not None:
    x, residual = liger_add_norm(self.last, self.mlp(x), residual)
return residual + x
"""
    },
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
NORM_AND_INPUT = Rule(
    rewrite.fuse_norm_and_input,
    NORMS,
    {
        "residual = x\nx = self.norm(x)\nx = self.mlp(x)\nreturn residual + x": (
            "x, residual = liger_norm_and_input(self.norm, x)\nx = self.mlp(x)\nreturn residual + x"
        )
    },
    [
        f"residual = x\nx = self.norm(x)\n{rest}"
        for rest in (
            "return residual, x",
            "residual += x\nreturn residual + x",
            "residual.add_(x)\nreturn residual + x",
            "return self.mix(residual, x)",
            "return residual * x",
        )
    ],
)
SIGMOIDS = frozenset({"torch.sigmoid", "F.sigmoid"})
GATES = Rule(
    rewrite.fuse_gates,
    SIGMOIDS,
    {
        "y = y * torch.sigmoid(gate)": "y = liger_gate(y, gate)",
        "y = F.sigmoid(self.g(x)) * y": "y = liger_gate(y, self.g(x))",
        "y = y * torch.sigmoid(self.g(x)).unsqueeze(-1)": "y = liger_gate(y, self.g(x).unsqueeze(-1))",
        "if self.gated:\n    y = y * torch.sigmoid(gate)": "if self.gated:\n    y = liger_gate(y, gate)",
        "return self.o(y * torch.sigmoid(gate), torch.sigmoid(z) * y)": (
            "return self.o(liger_gate(y, gate), liger_gate(y, z))"
        ),
    },
    [
        "y *= torch.sigmoid(gate)",
        "y = self.f(x) * torch.sigmoid(gate)",  # the order of calls would change
        "y = y * torch.sigmoid((y := x))",
        "y = y * sigmoid(gate)",
        "y = y * torch.sigmoid(gate, out=x)",
        "y = y * torch.sigmoid(gate).unsqueeze(0)",
        "y = y * torch.tanh(gate)",
        "y = y + torch.sigmoid(gate)",
    ],
)
GATED_ADDITIONS = Rule(
    lambda *args: rewrite.fuse_gates(*args) or rewrite.fuse_gated_additions(*args),
    SIGMOIDS,
    {
        "y = y * torch.sigmoid(self.g(x))\nx = x + y": "x = liger_gate(y, self.g(x), x)",
        "y = F.sigmoid(gate) * y\nx = y + x\nreturn x.mean()": "x = liger_gate(y, gate, x)\nreturn x.mean()",
        # Additions that stay.
        **{
            body.format("y * torch.sigmoid(gate)"): body.format("liger_gate(y, gate)")
            for body in (
                "y = {}\nx += y",  # others may hold x's tensor
                "y = {}\nx = x - y",
                "y = {}\nx = y + y",
                "y = {}\nz = x + y",
                "y = {}\nx = x + y\nreturn (x, y)",
                "y = {}\nprint(y)\nx = x + y",
                "f = lambda: y\ny = {}\nx = x + y\nreturn f()",
                "for _ in x:\n    y = {}\n    x = x + y",
            )
        },
    },
    [],
)
NORMED = "q = self.q_norm(q)\nk = self.k_norm(k)\n"
ROTATION = "q, k = rotate(q, k, cos, sin)\nreturn q, k"
HEAD_NORMS = Rule(
    head_norms.fuse_head_norms,
    frozenset({"q_norm", "k_norm", "rotate"}),
    {
        # Transposed results.
        """
q = self.q_norm(self.q(x).view(shape)).transpose(1, 2)
k = self.k_norm(self.k(x)).transpose(2, 1)
v = self.v(x)
cos, sin = residual
q, k = rotate(q, k, cos, sin, unsqueeze_dim=1)
return q, k, v
""": """
q, liger_norm_of_q = liger_delay_norm(self.q_norm, self.q(x).view(shape))
q = q.transpose(1, 2)
k, liger_norm_of_k = liger_delay_norm(self.k_norm, self.k(x))
k = k.transpose(1, 2)
v = self.v(x)
cos, sin = residual
q, k = liger_norm_and_rotate(rotate, (liger_norm_of_q, liger_norm_of_k), q, k, cos, sin, unsqueeze_dim=1)
return (q, k, v)
""",
        # Conditions around the norms and around the rotation.
        """
q, k = self.q(x), self.k(x)
if self.normed:
    q = self.q_norm(q)
    k = self.k_norm(k)
q = q.transpose(1, 2)
k = k.transpose(1, 2)
shape = q.shape
if self.rotated:
    cos, sin = residual
    q, k = rotate(q, k, cos, sin)
else:
    shape = None
return q, k, shape
""": """
q, k = (self.q(x), self.k(x))
liger_norm_of_q = None
liger_norm_of_k = None
if self.normed:
    q, liger_norm_of_q = liger_delay_norm(self.q_norm, q)
    k, liger_norm_of_k = liger_delay_norm(self.k_norm, k)
q = q.transpose(1, 2)
k = k.transpose(1, 2)
shape = q.shape
if self.rotated:
    cos, sin = residual
    q, k = liger_norm_and_rotate(rotate, (liger_norm_of_q, liger_norm_of_k), q, k, cos, sin)
else:
    q, k = liger_norm_heads((liger_norm_of_q, liger_norm_of_k), q, k)
    shape = None
return (q, k, shape)
""",
        # Rotated one by one.
        """
q = self.q_norm(q)
q = rotate(q, cos, sin)
if residual is None:
    k = self.k_norm(k)
    k = rotate(k, cos, sin)
return q, k
""": """
q, liger_norm_of_q = liger_delay_norm(self.q_norm, q)
q = liger_norm_and_rotate(rotate, (liger_norm_of_q,), q, cos, sin)
if residual is None:
    k, liger_norm_of_k = liger_delay_norm(self.k_norm, k)
    k = liger_norm_and_rotate(rotate, (liger_norm_of_k,), k, cos, sin)
return (q, k)
""",
    },
    [
        *(
            f"{NORMED}{between}\n{ROTATION}"
            for between in (
                "q = q.view(shape)",
                "q = q * 2",
                "q.mul_(2)",
                "q[0] = 2",
                "q = q.transpose(1, 3)",
                "q = k.transpose(1, 2)",
                "seen.append(q)",
                "if q.sum() > 0:\n    return q",
                "if self.x:\n    q = q + 1",
                "later = lambda: q",
            )
        ),
        f"{NORMED}for _ in range(2):\n    q, k = rotate(q, k, cos, sin)\nreturn q, k",
        f"{NORMED}if self.x:\n    seen.append(q)\n    q, k = rotate(q, k, cos, sin)\nreturn q, k",
        f"{NORMED}k, q = rotate(q, k, cos, sin)\nreturn q, k",
        f"{NORMED}q, k = rotate(k, q, cos, sin)\nreturn q, k",
        f"{NORMED}y, k = rotate(q, k, cos, sin)\nreturn y, k",
        f"{NORMED}q, k = rotate(q, k, cos, q)\nreturn q, k",
        f"{NORMED}q, k = other(q, k, cos, sin)\nreturn q, k",
        f"q = self.q_norm(q)\n{ROTATION}",
        *(
            f"{norm}\nk = self.k_norm(k)\n{ROTATION}"
            for norm in (
                "q = self.q_norm(q) * 2",
                "q = self.q_norm(q, 1)",
                "q = self.other(q)",
                "q = self.q_norm(q) if self.x else q",
                "if self.x:\n    q = self.q_norm(q)\nelse:\n    q = q + 1",
                "if q.sum() > 0:\n    q = self.q_norm(q)",
                "for _ in range(2):\n    q = self.q_norm(q)",
            )
        ),
        "q, k = rotate(q, k, cos, sin)\nq = self.q_norm(q)\nk = self.k_norm(k)\nreturn q, k",
    ],
)
JOINED = "y = x.new_empty(*x.shape[:-1], self.m + self.r)\ny[..., :self.m].copy_(a)\ny[..., self.m:].copy_(b)"
JOINS = Rule(
    latent_heads.fuse_joins,
    frozenset(),
    {JOINED: "y = liger_join(x, (*x.shape[:-1], self.m + self.r), self.m, a, b)"},
    [
        JOINED.replace("self.m:]", "self.n:]"),
        JOINED.replace(":self.m]", "1:self.m]"),
        JOINED.replace("...", ":"),
        JOINED.replace("y[..., self.m:]", "z[..., self.m:]"),
        JOINED.replace("(a)", "(a, True)"),
        JOINED.replace("copy_(b)", "add_(b)"),
        JOINED.replace("self.m", "self.m()"),
        JOINED.replace("self.r)", "self.r, dtype=a.dtype)"),
    ],
)
ROTATE_LAST = "b, k = rotate(b, k, cos, sin)"
ROTATED = f"""a, b = torch.split(q, [self.m, self.r], dim=-1)
{ROTATE_LAST}
if cache is not None:
    k = cache(k)
y = torch.cat((a, b), dim=-1)"""
IN_BRANCHES = ROTATED.replace(
    ROTATE_LAST, f"if self.pairs:\n    {ROTATE_LAST}\nelse:\n    b, k = other(b, k, cos, sin)"
)


def as_a_whole(body: str) -> str:
    cat = "torch.cat((a, b), dim=-1)"
    body = body.replace(cat, f"{cat} if liger_whole_b is None else liger_whole_b")
    call = "b, k, liger_whole_b = liger_rotate_last(rotate, q, b, k, cos, sin)"
    return f"liger_whole_b = None\n{body.replace(ROTATE_LAST, call)}"


QUERIES = Rule(
    latent_heads.fuse_queries,
    frozenset({"rotate"}),
    {body: as_a_whole(body) for body in (ROTATED, IN_BRANCHES)},
    [
        ROTATED.replace("k = cache", "b = cache"),
        ROTATED.replace("k = cache", "a = cache"),
        ROTATED.replace("k = cache(k)", "q.mul_(2)"),
        ROTATED.replace("(a, b), dim", "(b, a), dim"),
        ROTATED.replace("(a, b), dim=-1", "(a, b), dim=1"),
        ROTATED.replace("sin)", "sin, 1)"),
        ROTATED.replace("b, k = rotate(b, k,", "b, k = rotate(k, b,"),
        ROTATED.replace("b, k = rotate(b,", "k, b = rotate(b,"),
        ROTATED.replace("rotate(", "other("),
        ROTATED.replace("    k = cache(k)", "    b, k = rotate(b, k, cos, sin)"),
        IN_BRANCHES.replace("sin)\nelse", "sin)\n    b = 2 * b\nelse"),
    ],
)
RULES = {
    "projections": PROJECTIONS,
    "add and norm": ADD_NORM,
    "norm and input": NORM_AND_INPUT,
    "gates": GATES,
    "gated additions": GATED_ADDITIONS,
    "head norms": HEAD_NORMS,
    "joins": JOINS,
    "queries": QUERIES,
}


@pytest.mark.parametrize(
    "rule, body, expected",
    [
        (name, body, expected)
        for name, rule in RULES.items()
        for body, expected in [*rule.rewritten.items(), *((body, None) for body in rule.kept)]
    ],
)
def test_statements(rule, body, expected):
    found = after(RULES[rule].change, body, RULES[rule].names)
    assert found == (expected and ast.unparse(ast.parse(expected)))


# ---- Statements around a call of one function


class Around(NamedTuple):
    change: Callable  # of a method
    body: str
    changes: dict[str, tuple[str, str]]


def of_convolutions(make: Callable, *more: Any) -> Callable:
    def change(method):
        made = make(method, frozenset({"causal_conv1d_fn"}), *more)
        return made and rewrite.rewritten(method, made)

    return change


AROUND = {
    "delta gates": Around(
        delta_rule.with_gates,
        """
a, b = x
beta = b.sigmoid()
g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
return g, beta
""",
        {
            "reads beta": ("(a.float()", "(beta.float()"),
            "changes a": ("g = ", "a = a + 1\ng = "),
            "not negative": ("-self", "self"),
            "another slope": ("self.dt_bias)", "self.dt_bias, 2)"),
        },
    ),
    "short convolutions": Around(
        of_convolutions(short_convolutions.with_short),
        """
h, cache = x
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
""",
        {
            "another axis": ("rows = self.in_proj(h).transpose(-1, -2)", "rows = self.in_proj(h).transpose(-1, 0)"),
            "another order": ("b, c, x = ", "b, x, c = "),
            "two parts": ("rows.chunk(3", "rows.chunk(2"),
            "another dimension": ("dim=-2", "dim=-1"),
            "a sum": ("h = b * x", "h = b + x"),
            "another gate": ("y = c * h", "y = b * h"),
            "no cache": ("    if cache is not None:\n        h = cache.update(h)\n", ""),
            "used besides": ("self.weight)", "self.weight, h)"),
            "part of a condition": ("and cache.ready", "and b.any()"),
            "changed before": ("state = None", "c = c + 1\nstate = None"),
            "another function": ("= causal_conv1d_fn", "= other_fn"),
            "not turned": ("y = y.transpose(-1, -2).contiguous()", "y = y.transpose(0, 1).contiguous()"),
            "read later": ("return y", "return y, x"),
        },
    ),
    "split convolutions": Around(
        of_convolutions(split_convolutions.with_split, frozenset()),
        """
mixed, cache, sizes = x
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
""",
        {
            "another axis": ("mixed.transpose(1, 2)\nq", "mixed.transpose(1, 0)\nq"),
            "read later": ("return q, k, v", "return q, k, v, mixed"),
            "another dimension": ("dim=-1", "dim=-2"),
            "two parts": ("q, k, v = torch", "q, k = torch"),
            "no cache": ("    if cache is not None:\n        mixed = cache.update(mixed)\n", ""),
            "used besides": ("self.weight)", "self.weight, mixed)"),
            "changed before": ("    mixed = causal", "    mixed = mixed + 1\n    mixed = causal"),
            "another function": ("= causal_conv1d_fn", "= other_fn"),
            "another split": ("torch.split", "self.split"),
        },
    ),
}


def causal_conv1d_fn(x, weight, bias=None, activation=None, **kwargs):
    """Is looked for by its name."""


@pytest.mark.parametrize("kind, case", [(kind, case) for kind in AROUND for case in (None, *AROUND[kind].changes)])
def test_only_these_statements(kind, case):
    change, body, changes = AROUND[kind]
    if case is not None:
        assert changes[case][0] in body
        body = body.replace(*changes[case])
    method, _ = function(body, F=functional, causal_conv1d_fn=causal_conv1d_fn)
    assert (change(method) is not None) == (case is None)


# ---- What a change is told


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


def test_a_name_is_torchs_function_only_where_it_is():
    found, _ = function("return x")
    assert rewrite.sigmoids_in(found) == {"torch.sigmoid", "torch.nn.functional.sigmoid"}
    found.__globals__.update(F=functional, nn=nn)
    assert {"F.sigmoid", "nn.functional.sigmoid"} <= rewrite.sigmoids_in(found)
    found.__globals__["torch"] = nn
    assert "torch.sigmoid" not in rewrite.sigmoids_in(found)


REASONS = {
    "q, k = rotate(q, k, cos, sin)\nq = self.q_norm(q)\nk = self.k_norm(k)": "q_norm follows the rotation",
    f"{NORMED}q = q.view(shape)\nq, k = rotate(q, k, cos, sin)": "q changes between q_norm and the rotation",
    "q = self.layer(q)\nk = self.layer(k)\nq, k = rotate(q, k, cos, sin)": "layer is no RMSNorm",
    "q = self.q(self.q_norm(x))\nq, k = rotate(q, k, cos, sin)": "q changes between q_norm and the rotation",
    "x = self.q_norm(x)\nq = self.q(x)\nq, k = rotate(q, k, cos, sin)": "",
}


@pytest.mark.parametrize("body", REASONS)
def test_why_norms_and_rotation_are_apart(body):
    norms = {"q_norm": "", "k_norm": "", "layer": "is no RMSNorm"}
    assert head_norms.why_separate(function(body)[0], norms, frozenset({"rotate"})) == REASONS[body]


@pytest.mark.parametrize(
    "shapes",
    [((2, 3, 8), (2, 3, 8)), ((2, 3, 8), (2, 3, 1)), ((2, 3, 8), (8,)), ((2, 3, 8), (2, 1, 8)), ((3, 1), (3, 8))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_takes_what_multiplication_takes(shapes, dtype):
    x, g = torch.randn(shapes[0]).to(dtype), torch.randn(shapes[1])
    torch.testing.assert_close(rewrite.gate(x, g), x * torch.sigmoid(g))
    assert rewrite.gate(2.0, g).dtype == g.dtype
    for residual in (torch.randn(2, 3, 8), torch.randn(8).bfloat16(), 2.0):
        expected = residual + x * torch.sigmoid(g)
        torch.testing.assert_close(rewrite.gate(x, g, residual), expected, rtol=2**-7, atol=2**-7)
