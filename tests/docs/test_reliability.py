"""docs/reliability.md names tests that exist."""

import ast
import re

from tests.support.checks import ROOT

PAGE = (ROOT / "docs/reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def functions_of(path: str) -> set[str]:
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_promise_has_a_test():
    promises = [row for row in PAGE.partition("## Sanitizers")[0].splitlines() if re.match(r"\| (?!promise)", row)]
    assert len(promises) > 40
    assert [row for row in promises if not re.search(r"\| (`tests/[\w/]+\.py::\w+` ?)+\|$", row)] == []


def test_every_named_test_exists():
    """pytest collects the functions test_* of the files test_*.py in tests."""
    assert len(NAMED) > 60
    assert [(path, name) for path, name in NAMED if not re.search(r"/test_\w+\.py$", path) or name[:5] != "test_"] == []
    found = {path: functions_of(path) for path, _ in NAMED if (ROOT / path).exists()}
    assert [(path, name) for path, name in NAMED if name not in found.get(path, ())] == []
