"""Our experts under the expert parallelism of transformers compute what its eager experts compute in one process."""

import inspect

import expert_parallel_cases
import pytest
from transformers.distributed import DistributedConfig

from tests.support.host.process_group import run_case

if "ep_size" not in inspect.signature(DistributedConfig).parameters:
    pytest.skip("this transformers has no ep_size", allow_module_level=True)


@pytest.mark.parametrize("case", expert_parallel_cases.CASES.parameters())
def test_expert_parallel(case):
    run_case(case, expert_parallel_cases, 2)
