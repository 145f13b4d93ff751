"""Patched models train on several processes as unpatched ones do on one: tensor, sequence, context and pipeline
parallelism, and FSDP2 with tensor parallelism. FSDP2 alone is in test_sharded.py."""

from pathlib import Path

import pytest
from parallel_cases import CASES
from process_group import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, dict[str, str]]:
    script, folder = Path(__file__).with_name("parallel_cases.py"), tmp_path_factory.mktemp
    return {n: results_of(script, n, folder(f"processes{n}"), [*cases]) for n, cases in CASES.items()}


@pytest.mark.parametrize("processes, case", [(n, case) for n, cases in CASES.items() for case in cases])
def test_parallel_training(processes, case, results):
    assert not results[processes][case], results[processes][case]
