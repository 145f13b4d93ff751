"""torchtitan's models train with the overrides of liger_ops.integrations.torchtitan as they do without."""

from pathlib import Path

import pytest
from process_group import results_of
from torchtitan_cases import CASES

pytestmark = pytest.mark.torchtitan


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    return results_of(Path(__file__).with_name("torchtitan_cases.py"), 2, tmp_path_factory.mktemp("titan"), [*CASES])


@pytest.mark.parametrize("case", CASES)
def test_torchtitan(case, results):
    assert not results[case], results[case]
