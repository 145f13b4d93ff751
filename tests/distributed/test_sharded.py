"""Patched models train as unpatched ones do under FSDP2 and tensor parallelism."""

import lora_cases
import pytest
import sharded_cases

from tests.support.host.process_group import run_case


@pytest.mark.parametrize("case", sharded_cases.CASES.parameters())
def test_sharded(case):
    run_case(case, sharded_cases, 2)


@pytest.mark.parametrize("case", lora_cases.CASES.parameters())
def test_sharded_adapters(case):
    run_case(case, lora_cases, 2)
