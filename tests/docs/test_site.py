"""The site of `make docs`, as far as it can be tested without its tools."""

import re
import runpy
import sys
import types

import pytest

import liger_ops
from tests.support.checks import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()
NAVIGATION = re.findall(r"([\w/-]+\.md)$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
API = sorted((ROOT / "docs/api").glob("*.md"))


def test_the_navigation_lists_every_page_once():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    assert sorted(NAVIGATION) == sorted(page.relative_to(ROOT).as_posix() for page in pages)


def test_links_to_folders_lead_to_pages():
    """A code host shows folders, the site does not."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]:
        for link in re.findall(r"\]\(([^)\s#:]+)\)", page.read_text()):
            assert (page.parent / link).is_file(), f"{page}: {link}"


def test_what_the_pages_link_to_is_part_of_the_site():
    recipe = re.search(r"^docs: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", " docs", " examples", "benchmarks/results"):
        assert name in recipe
    assert "--strict" in recipe


@pytest.mark.parametrize("page", API, ids=lambda page: page.stem)
def test_api_pages_name_what_exists(page):
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
        module, _, member = name.rpartition(".")
        source = ROOT / module.replace(".", "/")
        files = [ROOT / f"{name.replace('.', '/')}.py", ROOT / name.replace(".", "/") / "__init__.py"]
        in_module = source.with_suffix(".py").is_file() and re.search(
            rf"^(def|class) {member}\b", source.with_suffix(".py").read_text(), re.MULTILINE
        )
        assert any(file.is_file() for file in files) or in_module, name


def test_every_public_module_has_an_api_page():
    text = "".join(page.read_text() for page in API)
    named = {"nn"} | {folder.name for folder in ROOT.glob("liger_ops/[a-z]*/") if (folder / "__init__.py").is_file()}
    internal = {"aot", "doctor", "kernels", "linear", "reference"}
    assert {name for name in named - internal if f"::: liger_ops.{name}" not in text} == set()
    assert "::: liger_ops\n" in text and set(liger_ops.__all__) > {"status", "preload"}


def test_the_style_sheet_exists():
    """mkdocs does not check that, even with --strict."""
    (sheets,) = re.findall(r"^extra_css: \[(.*)\]$", CONFIG, re.MULTILINE)
    assert all((ROOT / sheet).is_file() for sheet in sheets.split(", "))


def test_code_is_coloured():
    """fenced_code leaves it plain."""
    assert "  - pymdownx.highlight\n  - pymdownx.superfences\n" in CONFIG and "fenced_code" not in CONFIG


@pytest.fixture
def extension(monkeypatch):
    """docs/site.py, without the tools that it extends."""
    griffe = types.SimpleNamespace(Extension=object, Object=object)
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    return runpy.run_path(str(ROOT / "docs/site.py"))


def test_docstrings_become_markdown(extension):
    text = "As :func:`rms_norm` and `x`.\n\n>>> f(1)\n2\n>>> f(2)\n\nMore."
    expected = "As `rms_norm` and `x`.\n\n```pycon\n>>> f(1)\n2\n>>> f(2)\n```\n\nMore."
    assert extension["markdown"](text) == expected


def test_readers_switch_to_dark_and_find_the_repository():
    assert CONFIG.count("      toggle:\n") == 2 and "\nrepo_url: !ENV [LIGER_OPS_REPOSITORY, " in CONFIG


def test_search_finds_names_by_their_words_and_operators_first(extension):
    separator = re.search(r"^      separator: '(.*)'$", CONFIG, re.MULTILINE)[1]
    assert re.split(separator, "cross_entropy_with_metrics") == ["cross", "entropy", "with", "metrics"]
    found = {}
    for name in NAVIGATION:
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=name), meta={})
        extension["on_page_markdown"]("", page=page, config=None, files=None)
        found |= {name: page.meta} if page.meta else {}
    assert found == {"docs/operators.md": {"search": {"boost": 2}}}
