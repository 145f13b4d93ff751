"""Our experts under the expert parallelism of transformers compute what its eager experts compute in one process."""

import inspect
from pathlib import Path

import pytest
from expert_parallel_cases import CASES
from process_group import results_of
from transformers.distributed import DistributedConfig

if "ep_size" not in inspect.signature(DistributedConfig).parameters:
    pytest.skip("this transformers has no ep_size", allow_module_level=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    script, folder = Path(__file__).with_name("expert_parallel_cases.py"), tmp_path_factory.mktemp("experts")
    return results_of(script, 2, folder, [*CASES])


@pytest.mark.parametrize("case", CASES)
def test_expert_parallel(case, results):
    assert not results[case], results[case]
