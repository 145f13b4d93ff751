"""Patched models train as unpatched ones do under FSDP2 and tensor parallelism."""

import pytest
import sharded_cases
from process_group import run_case


@pytest.mark.parametrize("case", sharded_cases.CASES.parameters())
def test_sharded(case):
    run_case(case, sharded_cases, 2)
