"""Losses whose classes are split over processes."""

import pytest
import vocab_parallel_cases as cases
from torch.cuda import device_count

from tests.support.host.process_group import run_case


@pytest.mark.parametrize("case", cases.CASES.parameters(cases.ON_CPU))
def test_every_rank_computes_the_results_of_all_classes(case):
    run_case(case, cases, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES.parameters(cases.ON_GPUS))
def test_every_gpu_computes_the_results_of_all_classes(case):
    """With one GPU, in a group of one process."""
    run_case(case, cases, min(device_count(), 4), "cuda")
