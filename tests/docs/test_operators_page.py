"""docs/operators.md is what the declarations say."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from liger_ops.aot import operators_page
from liger_ops.reference import _operator, operators
from liger_ops.reference._documentation import documentation
from tests.support.checks import ROOT, output_of


def test_the_page_is_up_to_date():
    """After a change of a declaration: python -m liger_ops.aot.operators_page docs/operators.md"""
    assert (ROOT / "docs/operators.md").read_text() == operators_page.page()


def test_lines_are_short():
    """But for rows of tables, which cannot be broken."""
    assert not [line for line in operators_page.page().splitlines() if len(line) > 120 and line[0] != "|"]


@pytest.mark.parametrize("name", [name for name, o in operators().items() if not o.alias_of])
def test_a_declaration_says_what_the_page_needs(name):
    declared = operators()[name]
    found = documentation(declared)
    tensors = {n for n, p in declared.__signature__.parameters.items() if "Tensor" in p.annotation}
    assert found.summary and found.examples and set(found.tensors) == tensors
    # A form has the cost of its base unless it says another.
    assert declared.base is not None or found.cost
    # A result without a name has its shape behind the tensors.
    assert declared.base is not None or found.result or hasattr(declared.result, "_fields")


def test_every_operator_has_a_section():
    headings = re.findall(r"^##+ `(\w+)`$", operators_page.page(), re.MULTILINE)
    assert sorted(headings) == sorted(name for name, o in operators().items() if not o.alias_of)


def test_the_readme_names_operators_that_exist():
    table = (ROOT / "README.md").read_text().partition("| task |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert len(named) > 15 and named <= set(operators())


# ---- Layouts of DTensors

RULES = {
    "norms": """
'''`x`: R -> R.

rms_norm: S(0)
-> S(0).'''

@sharding("rms_norm", "layer_norm")
def forward(): ...
""",
    "cross_entropy": """
loss_on_dtensors("cross_entropy", forms={"": 0, "_with_metrics": 1})
""",
    "fused_linear_log_probs": """
'''R -> R.'''
results = ("log_probs", "entropy")
""",
    "mm": """
'''Private.'''
@sharding("_mm")
def product(): ...
""",
}


def test_layouts_are_read_from_the_docstrings_of_rules(monkeypatch, tmp_path):
    for stem, text in RULES.items():
        (tmp_path / f"{stem}.py").write_text(text)
    (tmp_path / "log_probs.py").touch()
    monkeypatch.setattr(operators_page, "RULES", tmp_path)
    assert operators_page.layouts.__wrapped__() == {
        "rms_norm": ["`x`: R -> R.", "S(0) -> S(0)."],
        "layer_norm": ["`x`: R -> R."],
        "cross_entropy": [],
        "cross_entropy_with_metrics": [],
        "fused_linear_log_probs": ["R -> R."],
        "log_probs": [],
    }


@pytest.mark.parametrize(
    "name,text",
    [
        ("rms_norm", "**[DTensor](distributed.md#dtensor):**\n\n- `x`: R or S"),
        ("log_probs", "**[DTensor](distributed.md#dtensor):** R or S"),
        ("rope_freqs_cis", "**[DTensor](distributed.md#dtensor):** there are no rules. Convert"),
        ("cross_entropy_", "**[DTensor](distributed.md#dtensor):** there are no rules. Convert"),
    ],
)
def test_a_section_has_the_layouts(name, text):
    assert text in "\n".join(operators_page.section(operators()[name]))


def test_a_form_has_no_layouts_of_its_own():
    section = "\n".join(operators_page.section(operators()["cross_entropy_with_metrics"]))
    assert "DTensor" not in section


def test_the_page_is_written_without_an_import_of_dtensor():
    code = "import sys\nfrom liger_ops.aot import operators_page\nassert operators_page.page()\n"
    assert output_of(code + "print('torch.distributed.tensor' in sys.modules)").split() == ["False"]


# ---- The generator


@pytest.fixture
def declared(monkeypatch):
    """An operator and a form of it, for as long as the test runs."""
    monkeypatch.setattr(_operator, "_declared", {})
    monkeypatch.setattr(torch.jit._builtins, "_register_builtin", lambda *_: None)

    @_operator.operator(constants=("table",), choices={"mode": ("fast", "exact")})
    def scaled(x: Tensor, ids: Tensor, table: Tensor | None = None, *, mode: str = "fast") -> Tensor:
        """x, scaled as :func:`rms_norm` is.

        x: (..., n), ids and table: (V,) indices, table: (V, n) in x's dtype or fp32 -> (..., n) in fp32. `mode` matters.

        Cost: two GEMMs.

        >>> 1 + 1
        2
        """

    @_operator.form_of(scaled)
    def scaled_twice(**given) -> Tensor:
        """:func:`scaled`, twice.

        x: (..., n) of any sign, ids: (V,) indices, table: (V, n).

        >>> 2 + 2
        4
        """

    return scaled, scaled_twice


def test_a_docstring_is_parsed(declared):
    found = documentation(declared[0])
    assert {name: (t.shapes, t.note) for name, t in found.tensors.items()} == {
        "x": ("(..., n)", ""), "ids": ("(V,)", "indices"), "table": ("(V, n)", "in x's dtype or fp32"),
    }  # fmt: skip
    assert (found.result, found.text, found.cost) == ("(..., n) in fp32", ["`mode` matters."], "two GEMMs.")


def test_a_section_has_what_the_declaration_says(declared):
    section = "\n".join(operators_page.section(declared[0]))
    for part in (
        'scaled(x, ids, table=None, *, mode="fast") -> Tensor',
        "scaled as [`rms_norm`](#rms_norm) is",
        "| `x` | (..., n) |  | yes |",
        "| `ids` | (V,) indices |  | no |",
        "| `table` | (V, n) in x's dtype or fp32 | `None` | no |",
        '| `mode` | `"fast"`, `"exact"` | `"fast"` | |',
        "**Result:** (..., n) in fp32.",
        "**Cost:** two GEMMs.",
        "```python\n1 + 1\n# 2\n```",
    ):
        assert part in section
    form = "\n".join(operators_page.section(declared[1]))
    assert "### `scaled_twice`" in form and "`x`: (..., n) of any sign." in form and "|" not in form
