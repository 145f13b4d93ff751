"""liger_ops.functional: its examples, its agreement with the operator schemas, and its additional functions."""

from __future__ import annotations

import doctest
import inspect
import json
import pickle
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_ops import functional, nn, reference
from liger_ops.aot import declarations
from liger_ops.doctor.installation import operators
from liger_ops.reference import _operator
from tests.support.checks import count_graphs, record_calls


@pytest.mark.parametrize("module", [functional, nn], ids=lambda m: m.__name__)
def test_the_examples_run(module):
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("name", [n for n in functional.__all__ if inspect.isfunction(getattr(functional, n))])
def test_every_function_is_documented_and_typed(name):
    function = getattr(functional, name)
    assert function.__doc__ and (">>>" in function.__doc__ or function.alias_of)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("name", operators())
def test_the_declaration_matches_the_schema(name):
    declared = torch._C.parse_schema(f"liger::{reference.operators()[name].schema}")
    assert str(declared) == str(getattr(torch.ops.liger, name).default._schema)


def arguments_of(function):
    """A distinct value for each parameter."""
    return {p: [object()] if p == "mrope_section" else object() for p in inspect.signature(function).parameters}


def parameters_of(function):
    return inspect.signature(function).parameters.values()


@pytest.mark.parametrize("name", operators())
def test_arguments_reach_the_operator(name, monkeypatch):
    function, calls = getattr(functional, name), record_calls(monkeypatch, name, None)
    given = arguments_of(function)
    function(**given)
    assert calls == [given]


def test_arguments_reach_every_head(monkeypatch):
    calls = record_calls(monkeypatch, "fused_linear_cross_entropy", torch.zeros(()))
    given = arguments_of(functional.fused_linear_cross_entropy_heads)
    weights, targets = ([object(), object()] for _ in range(2))
    functional.fused_linear_cross_entropy_heads(**given | dict(weights=weights, targets=targets))
    shared = {k: v for k, v in given.items() if k not in ("weights", "targets")}
    shared |= dict(bias=None, ce_weight=None)
    assert calls == [shared | dict(weight=w, target=t) for w, t in zip(weights, targets)]


def test_every_operator_is_declared_and_public():
    assert list(reference.operators()) == operators()
    assert set(operators()) < set(functional.__all__)


def test_the_type_stub_declares_the_public_names():
    stub = Path(functional.__file__).parent / declarations.STUB
    assert stub.read_text() == declarations.stub()
    scope: dict = {}
    exec(stub.read_text(), scope)
    for name, value in reference.public_names().items():
        declared = scope.pop(name)
        if getattr(value, "is_derived", False):
            assert typing.get_type_hints(declared, scope) == typing.get_type_hints(value)
            assert [(p.name, p.kind, p.default) for p in parameters_of(declared)] == [
                (p.name, p.kind, p.default) for p in parameters_of(value)
            ]
        else:
            assert declared is value
    assert not scope.keys() - {"__builtins__", "Sequence", "Tensor"}


def test_results_have_names():
    logits, target = torch.randn(3, 8), torch.arange(3)
    assert type(functional.cross_entropy_with_metrics(logits, target)) is functional.CrossEntropyMetrics
    head = torch.randn(5, 8)
    result = functional.fused_linear_cross_entropy_with_log_probs(logits, head, target)
    assert type(result) is functional.LogProbabilities


def test_functions_compile_and_can_be_scripted_and_pickled():
    def function(x: torch.Tensor, w: torch.Tensor):
        y, s = functional.fused_add_rms_norm(x, x, w, casting_mode="gemma")
        return functional.swiglu(y, s)

    x, w = torch.randn(3, 8), torch.randn(8)
    backend, graphs = count_graphs()
    expected = function(x, w)
    assert torch.equal(torch.compile(function, backend=backend, fullgraph=True)(x, w), expected) and len(graphs) == 1
    assert torch.equal(torch.jit.script(function)(x, w), expected)
    assert pickle.loads(pickle.dumps(functional.swiglu)) is functional.swiglu


X = torch.ones(1, 2, 3, 4)


@pytest.mark.parametrize(
    "name, args, options, message",
    [
        ("rms_norm", (None,), {}, r"x must be a Tensor \(got None\)"),
        ("rms_norm", ([1.0],), {}, r"x must be a Tensor \(got list\)"),
        ("rms_norm", (X, 3), {}, r"weight must be a Tensor or None \(got 3\)"),
        ("rms_norm", (X,), {"eps": "1e-6"}, r"eps must be a float \(got '1e-6'\)"),
        ("rms_norm", (X,), {"eps": None}, r"eps must be a float \(got None\)"),
        ("rms_norm", (X,), {"casting_mode": 1}, r"casting_mode must be a str \(got 1\)"),
        ("rms_norm", (), {}, "missing a required argument: 'x'"),
        ("rms_norm", (X,), {"epsilon": 1e-6}, "got an unexpected keyword argument 'epsilon'"),
        ("rope", (X, None, X[0], X[0]), {}, r"k must be a Tensor \(got None\)"),
        ("rope", (X, X, X[0], X[0]), {"interleaved": "no"}, r"interleaved must be a bool \(got 'no'\)"),
        (
            "rope",
            (X, X, X[0], X[0]),
            {"mrope_section": 2},
            r"mrope_section must be a sequence of ints or None \(got 2\)",
        ),
        ("log_probs", (X, None), {}, r"index must be a Tensor \(got None\)"),
        ("cross_entropy", (X, X), {"ignore_index": 0.5}, r"ignore_index must be an int \(got 0.5\)"),
    ],
)
def test_arguments_of_wrong_types(name, args, options, message):
    with pytest.raises(TypeError, match=f"^{name}: {message}"):
        getattr(functional, name)(*args, **options)


@pytest.fixture
def operator_of_lists(monkeypatch):
    """An operator with arguments of all list types, for as long as the test runs."""
    monkeypatch.setattr(_operator, "_declared", {})
    monkeypatch.setattr(torch.jit._builtins, "_register_builtin", lambda *_: None)

    @_operator.operator()
    def made_of_lists(
        xs: Sequence[Tensor],
        factors: Sequence[float],
        dims: Sequence[int] = (0, 1),
        offsets: Sequence[float] | None = None,
        *,
        limits: Sequence[float] = (0.5, 1e-6),
        order: Sequence[int] | None = None,
    ) -> Tensor:
        """The sum of tensors times factors."""
        return sum(x * f for x, f in zip(xs, factors))

    @_operator.form_of(made_of_lists)
    def made_of_lists_twice(op: str, **given: Any) -> tuple[Tensor, Tensor]:
        """The same, twice."""
        return made_of_lists.reference(**given), made_of_lists.reference(**given)

    with torch.library._scoped_library("liger", "FRAGMENT") as library:
        for function in (made_of_lists, made_of_lists_twice):
            library.define(function.schema)
            library.impl(function.__name__, function.reference, "CompositeImplicitAutograd")
        yield made_of_lists, made_of_lists_twice


LISTS = (
    "(Tensor[] xs, float[] factors, int[] dims=[0, 1], float[]? offsets=None, *, float[] limits=[0.5, 1e-6], "
    "int[]? order=None)"
)


def test_lists_are_declared(operator_of_lists):
    once, twice = operator_of_lists
    assert once.schema == f"made_of_lists{LISTS} -> Tensor"
    assert twice.schema == f"made_of_lists_twice{LISTS} -> (Tensor, Tensor)"
    registered = torch.ops.liger.made_of_lists.default._schema
    assert str(torch._C.parse_schema(f"liger::{once.schema}")) == str(registered)
    x, y = torch.ones(2), torch.full((2,), 2.0)
    assert once([x, y], [3.0, 0.5]).tolist() == [4.0, 4.0]
    assert [t.tolist() for t in twice([x, y], factors=(1, 2), dims=[1], offsets=[0.5])] == [[5.0, 5.0]] * 2


def test_lists_reach_the_header_and_the_stub(operator_of_lists, monkeypatch):
    once, twice = operator_of_lists
    header = declarations.cpp_function(once)
    for parameter in (
        "at::TensorList xs,",
        "at::ArrayRef<double> factors,",
        "at::IntArrayRef dims = {0, 1},",
        "std::optional<at::ArrayRef<double>> offsets = std::nullopt,",
        "at::ArrayRef<double> limits = {0.5, 1e-06},",
        "at::OptionalIntArrayRef order = std::nullopt) {",
    ):
        assert f"    {parameter}\n" in header
    assert "op.call(xs, factors, dims, offsets, limits, order);" in header
    monkeypatch.setattr(declarations, "public_names", lambda: {"made_of_lists_twice": twice})
    monkeypatch.setattr(declarations, "operators", lambda: {"made_of_lists": once, "made_of_lists_twice": twice})
    scope: dict = {}
    exec(declarations.stub(), scope)
    assert typing.get_type_hints(scope["made_of_lists_twice"], scope) == typing.get_type_hints(twice)
    assert f'constexpr const char* made_of_lists =\n    "{once.schema}";' in declarations.schemas()


@pytest.mark.parametrize(
    "args, options, message",
    [
        ((3, [1.0]), {}, r"xs must be a sequence of Tensors \(got 3\)"),
        (([X, 1.0], [1.0]), {}, r"xs must be a sequence of Tensors \(got list of Tensor and float\)"),
        (([X], ["1"]), {}, r"factors must be a sequence of floats \(got list of str\)"),
        (([X], [1.0], [0.5]), {}, r"dims must be a sequence of ints \(got list of float\)"),
        (([X], [1.0]), {"offsets": "no"}, r"offsets must be a sequence of floats or None \(got 'no'\)"),
        (([X], [1.0]), {"limits": None}, r"limits must be a sequence of floats \(got None\)"),
    ],
)
def test_lists_of_wrong_types(operator_of_lists, args, options, message):
    for function in operator_of_lists:
        with pytest.raises(TypeError, match=f"^{function.__name__}: {message}"):
            function(*args, **options)


def test_the_header_of_schemas_has_every_operator(tmp_path):
    declarations.write(tmp_path, tmp_path / "generated")
    text = (tmp_path / "generated" / declarations.SCHEMAS).read_text()
    found = re.findall(r'inline constexpr const char\* (\w+) =\n    (".*");', text)
    assert {name: json.loads(schema) for name, schema in found} == {
        name: operator.schema for name, operator in reference.operators().items()
    }


def test_errors_of_the_operator_pass():
    with pytest.raises(RuntimeError, match="rms_norm: eps must be finite and not negative"):
        functional.rms_norm(X, eps=-1.0)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rotary_accepts_both_layouts(unsqueeze_dim, device):
    shape = (2, 3, 5, 8) if unsqueeze_dim == 1 else (2, 5, 3, 8)
    q, k = (torch.randn(shape, device=device) for _ in range(2))
    angles = torch.randn(2, 5, 4, device=device).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def reference(x):
        a, b = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(unsqueeze_dim) + torch.cat([-b, a], -1) * sin.unsqueeze(unsqueeze_dim)

    for ours, x in zip(functional.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim), (q, k)):
        torch.testing.assert_close(ours, reference(x))


def test_rotary_names_a_wrong_layout():
    q = torch.zeros(1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"apply_rotary_pos_emb: unsqueeze_dim must be 1 or 2 \(got 3\)"):
        functional.apply_rotary_pos_emb(q, q, q[0], q[0], unsqueeze_dim=3)


def test_each_head_has_its_own_loss(device):
    x, heads = torch.randn(2, 5, 8, device=device), [torch.randn(v, 8, device=device) for v in (11, 7)]
    targets = torch.randint(7, (2, 2, 5), device=device)
    losses = functional.fused_linear_cross_entropy_heads(x, heads, targets, reduction="none", softcap=5.0)
    assert losses.shape == targets.shape
    for loss, head, target in zip(losses, heads, targets):
        assert torch.equal(loss, functional.fused_linear_cross_entropy(x, head, target, reduction="none", softcap=5.0))
    with pytest.raises(ValueError, match=r"targets must have one entry per weight, 2 \(got 1\)"):
        functional.fused_linear_cross_entropy_heads(x, heads, targets[:1])


def test_plan_equals_the_operators_plan():
    from liger_ops.functional import fused_linear_cross_entropy_plan as plan

    ours = plan(1000, 64, 5000, torch.float32, bias_grad=True, memory_budget=1 << 20)
    theirs = torch.ops.liger._fused_linear_cross_entropy_plan(1000, 64, 5000, torch.float32, 7, 1 << 20)
    assert tuple(ours) == theirs and ours.peak == ours.workspace + ours.gradients
    assert ours.workspace <= 1 << 20 and ours.chunks > 1
    assert ours.gradients == 4 * (1000 * 64 + 5000 * 64 + 5000)
    assert plan(1000, 64, 5000, input_grad=False, weight_grad=False).gradients == 0
