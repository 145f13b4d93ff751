"""Divergences of two heads whose classes are split over processes."""

from pathlib import Path

import pytest
from process_group import results_of, solo_group
from strategies import own_test_file
from torch.cuda import device_count
from vocab_parallel_cases import CASES

from liger_ops.reference import operators

WHOLE = own_test_file(operators()["fused_linear_divergence"])

SCRIPT = Path(__file__).with_name("vocab_parallel_cases.py")
NAMES = [name for name in CASES if name.startswith("divergence,")]


def vary(draw, arguments):
    """For test_properties.py."""
    WHOLE.vary(draw, arguments)
    arguments |= dict(group=solo_group(), classes=arguments["s_weight"].shape[0])


def noise(op, group, classes, class_sizes, sequence_dim, **arguments):
    return WHOLE.noise(op, **arguments)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    return results_of(SCRIPT, 2, tmp_path_factory.mktemp("split"), NAMES)


@pytest.mark.parametrize("case", NAMES)
def test_both_ranks_compute_the_results_of_all_classes(case, results):
    assert not results[case], results[case]


# With more than two, the sums of the ranks depend on their order, and classes can be split in more ways.
THREE = [name for name in NAMES if name.startswith("divergence, beta 0.3")]


@pytest.fixture(scope="module")
def results_of_three(tmp_path_factory) -> dict[str, str]:
    return results_of(SCRIPT, 3, tmp_path_factory.mktemp("split"), THREE)


@pytest.mark.parametrize("case", THREE)
def test_three_ranks_compute_the_results_of_all_classes(case, results_of_three):
    assert not results_of_three[case], results_of_three[case]


@pytest.fixture(scope="module")
def results_on_gpus(tmp_path_factory) -> dict[str, str]:
    """With one GPU, in a group of one process."""
    return results_of(SCRIPT, min(device_count(), 4), tmp_path_factory.mktemp("split"), NAMES, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", NAMES)
def test_every_gpu_computes_the_results_of_all_classes(case, results_on_gpus):
    assert not results_on_gpus[case], results_on_gpus[case]
