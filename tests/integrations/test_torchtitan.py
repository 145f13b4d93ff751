"""torchtitan's models train with the overrides of liger_ops.integrations.torchtitan as they do without."""

import pytest
import torchtitan_cases
from process_group import run_case

pytestmark = pytest.mark.torchtitan


@pytest.mark.parametrize("case", torchtitan_cases.CASES.parameters())
def test_torchtitan(case):
    # DTensor's caches take equal meshes for one another, which fully_shard refuses: these need new processes.
    run_case(case, torchtitan_cases, 2, alone="full_dtensor" in case and "EP" in case)
