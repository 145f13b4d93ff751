"""Operators on DTensors compute what they compute on whole tensors, with the collectives that the rules list."""

from pathlib import Path

import pytest
from dtensor_cases import CASES
from process_group import results_of
from support import output_of


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    return results_of(Path(__file__).with_name("dtensor_cases.py"), 4, tmp_path_factory.mktemp("dtensor"), [*CASES])


@pytest.mark.parametrize("case", CASES)
def test_dtensor(case, results):
    assert not results[case], results[case]


def test_importing_loads_no_dtensor():
    loaded = output_of("import sys, liger_ops; print('torch.distributed.tensor' in sys.modules)")
    assert loaded == "False\n"
