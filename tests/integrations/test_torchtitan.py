"""torchtitan's models train with the overrides of liger_ops.integrations.torchtitan as they do without."""

import pytest
import torchtitan_cases

from tests.support.host.process_group import run_case

pytestmark = pytest.mark.torchtitan


@pytest.mark.parametrize("case", torchtitan_cases.CASES.parameters())
def test_torchtitan(case):
    run_case(case, torchtitan_cases, 2)
