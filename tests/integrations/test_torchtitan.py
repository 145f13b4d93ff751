"""torchtitan's models train with the overrides of liger_ops.integrations.torchtitan as they do without."""

from pathlib import Path

import pytest
import torchtitan_cases
from process_group import results_of
from torchtitan_cases import CASES

pytestmark = pytest.mark.torchtitan


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    # DTensor's caches take equal meshes for one another, which fully_shard refuses: these need new processes.
    alone = [name for name in CASES if "full_dtensor" in name and "EP" in name]
    script, found = Path(torchtitan_cases.__file__), {}
    for names in ([name for name in CASES if name not in alone], *([name] for name in alone)):
        found |= results_of(script, 2, tmp_path_factory.mktemp("titan"), names)
    return found


@pytest.mark.parametrize("case", CASES)
def test_torchtitan(case, results):
    assert not results[case], results[case]
