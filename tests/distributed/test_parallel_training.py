"""Patched models train on several processes as unpatched ones do on one: tensor, sequence, context and pipeline
parallelism, and FSDP2 with tensor parallelism. FSDP2 alone is in test_sharded.py."""

import parallel_cases
import pytest

from tests.support.host.process_group import run_case


@pytest.mark.parametrize("case", parallel_cases.CASES.parameters())
def test_parallel_training(case):
    run_case(case, parallel_cases, parallel_cases.PROCESSES[case])
