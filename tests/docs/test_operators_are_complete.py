"""What an operator needs beside its code and the tests that find it by its declaration: each missing piece fails by name."""

import re

import dtensor_cases
import dtensor_expert_cases
import dtensor_loss_cases
import pytest
import torch

from liger_ops.aot import operators_page
from liger_ops.reference import operators
from tests.support.checks import ROOT

PUBLIC = [name for name, operator in operators().items() if not operator.alias_of]


def text_of(*patterns: str) -> str:
    return "\n".join(path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern)))


CASES = "\n".join(name for module in (dtensor_cases, dtensor_expert_cases, dtensor_loss_cases) for name in module.CASES)


def base_of(name: str) -> str:
    """A form stands on pages with the operator that it is a form of."""
    operator = operators()[name]
    return name if operator.base is None else base_of(operator.base.__name__)


@pytest.mark.parametrize("name", PUBLIC)
def test_dtensor_rules_of_the_operator_are_documented_and_tested(name):
    """The page of operators says which have none."""
    layouts = operators_page.layouts()
    if name in layouts:
        assert layouts[name], f"liger_ops/distributed/rules: a file's docstring must give the layouts of {name}"
        assert re.search(rf"\b{base_of(name)}\b", CASES), f"tests/distributed: {name} has no case with DTensors"


def test_policies_of_checkpoints_are_told_every_private_forward_operator():
    registered = {name for name in torch._C._dispatch_get_all_op_names() if re.fullmatch(r"liger::_\w+_fwd", name)}
    named = set(re.findall(r"`(liger::_\w+_fwd)`", text_of("docs/leaving-python.md")))
    assert named == registered, f"docs/leaving-python.md, of checkpoints: {sorted(named ^ registered)}"


def test_the_page_of_folders_names_them_all():
    page = text_of("docs/architecture.md")
    folders = (ROOT / "liger_ops" / folder for folder in (".", "_runtime", "linear"))
    files = {path.name for folder in folders for path in folder.glob("*.py")} - {"__init__.py", "_version.py"}
    families = {path.name for path in (ROOT / "csrc/ops").iterdir() if path.is_dir()}
    missing = sorted(name for name in files | families if f"{name}`" not in page)
    assert not missing, f"docs/architecture.md does not name {missing}"
