"""Divergences of two heads whose classes are split over processes."""

import pytest
import vocab_parallel_fused_linear_divergence_cases as cases
from process_group import run_case
from strategies import own_test_file
from torch.cuda import device_count

from liger_ops.reference import operators

WHOLE = own_test_file(operators()["fused_linear_divergence"])
precision = WHOLE.precision


def vary(draw, arguments):
    """For test_properties.py."""
    arguments["vocab_map"] = None


def noise(op, group, classes, class_sizes, sequence_dim, vocab_map, **arguments):
    return WHOLE.noise(op, **arguments)


@pytest.mark.parametrize("case", cases.CASES.parameters())
def test_every_rank_computes_the_results_of_all_classes(case):
    run_case(case, cases, 2)


# With more than two, the sums of the ranks depend on their order, and classes can be split in more ways.
THREE = [name for name in cases.CASES if name.startswith("divergence, beta 0.3")]


@pytest.mark.parametrize("case", cases.CASES.parameters(THREE))
def test_three_ranks_compute_the_results_of_all_classes(case):
    run_case(case, cases, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES.parameters(cases.ON_GPUS))
def test_every_gpu_computes_the_results_of_all_classes(case):
    """With one GPU, in a group of one process."""
    run_case(case, cases, min(device_count(), 4), "cuda")
