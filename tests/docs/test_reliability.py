"""docs/reliability.md names tests that exist."""

import ast
import re
import subprocess
import sys

import pytest
from checks import ROOT, environment_of_tree

PAGE = (ROOT / "docs/reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def collected(*arguments: str) -> set[str]:
    """The tests that pytest would run, without their parameters."""
    command = [sys.executable, "-m", "pytest", "--collect-only", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment_of_tree(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}


def needs_a_gpu(path: str) -> set[str]:
    """Tests that are deselected without one."""
    functions = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any("mark.gpu" in ast.unparse(d) for d in f.decorator_list)}


def test_every_promise_has_a_test():
    promises = [row for row in PAGE.partition("## Sanitizers")[0].splitlines() if re.match(r"\| (?!promise)", row)]
    assert len(promises) > 40
    assert [row for row in promises if not re.search(r"\| (`tests/[\w/]+\.py::\w+` ?)+\|$", row)] == []


@pytest.mark.library
def test_every_named_test_is_collected():
    found = collected(*{path for path, _ in NAMED})
    missing = [(path, name) for path, name in NAMED if f"{path}::{name}" not in found and name not in needs_a_gpu(path)]
    assert len(found) > len(NAMED) and missing == []


def test_the_tests_of_a_file_are_collected():
    assert collected("tests/docs/test_reliability.py") == {
        f"tests/docs/test_reliability.py::{name}" for name in globals() if name.startswith("test_")
    }
