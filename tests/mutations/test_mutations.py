"""The table of defects fits the sources. run.py applies the defects."""

from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.support.checks import ROOT


@pytest.fixture(scope="module")
def mutations():
    """run.py, which imports the table beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        spec = spec_from_file_location("mutations", Path(__file__).with_name("run.py"))
        module = module_from_spec(spec)
        patch.setitem(__import__("sys").modules, "mutations", module)
        spec.loader.exec_module(module)
        yield module


def test_every_defect_changes_one_place(mutations):
    for defect in mutations.DEFECTS:
        text = (ROOT / defect.file).read_text()
        assert mutations.mutated(defect, text) != text, defect.name


def test_every_defect_has_tests(mutations):
    for defect in mutations.DEFECTS:
        assert mutations.tests_of(defect, ROOT / "tests", flat=False), defect.name


def test_names_are_unique(mutations):
    assert max(Counter(defect.name for defect in mutations.DEFECTS).values()) == 1
