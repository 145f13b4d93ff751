"""Linear cross entropy with a head whose classes are split over processes."""

from pathlib import Path

import pytest
from process_group import results_of, solo_group
from torch.cuda import device_count
from vocab_parallel_cases import CASES, LARGE

SCRIPT = Path(__file__).with_name("vocab_parallel_cases.py")
NAMES = [name for name in CASES if name.startswith("linear,")]


def vary(draw, arguments):
    """For test_properties.py."""
    arguments |= dict(group=solo_group(), classes=arguments["weight"].shape[0])


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, str]:
    return results_of(SCRIPT, 3, tmp_path_factory.mktemp("split"), NAMES)


@pytest.mark.parametrize("case", NAMES)
def test_every_rank_computes_the_loss_of_all_classes(case, results):
    assert not results[case], results[case]


@pytest.fixture(scope="module")
def results_on_gpus(tmp_path_factory) -> dict[str, str]:
    """With one GPU, in a group of one process."""
    return results_of(SCRIPT, min(device_count(), 4), tmp_path_factory.mktemp("split"), [*NAMES, *LARGE], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*NAMES, *LARGE])
def test_every_gpu_computes_the_loss_of_all_classes(case, results_on_gpus):
    assert not results_on_gpus[case], results_on_gpus[case]
