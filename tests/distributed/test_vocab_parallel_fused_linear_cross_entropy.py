"""Linear cross entropy with a head whose classes are split over processes."""

import linear_losses
import pytest
import vocab_parallel_fused_linear_cross_entropy_cases as cases
from process_group import run_case
from torch.cuda import device_count

precision = linear_losses.precision


def noise(op, group, classes, class_sizes, sequence_dim, **arguments):
    return linear_losses.noise(op.removeprefix("vocab_parallel_"), **arguments)


@pytest.mark.parametrize("case", cases.CASES.parameters(cases.ON_CPU))
def test_every_rank_computes_the_loss_of_all_classes(case):
    run_case(case, cases, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES.parameters(cases.ON_GPUS))
def test_every_gpu_computes_the_loss_of_all_classes(case):
    """With one GPU, in a group of one process."""
    run_case(case, cases, min(device_count(), 4), "cuda")
