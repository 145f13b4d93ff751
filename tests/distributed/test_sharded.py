"""Patched models train as unpatched ones do under FSDP2 and tensor parallelism."""

from pathlib import Path

import pytest
from process_group import results_of
from sharded_cases import CASES


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    return results_of(Path(__file__).with_name("sharded_cases.py"), 2, tmp_path_factory.mktemp("sharded"), [*CASES])


@pytest.mark.parametrize("case", CASES)
def test_sharded(case, results):
    assert not results[case], results[case]
