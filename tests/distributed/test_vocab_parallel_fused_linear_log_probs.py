"""Log-probabilities of a head whose classes are split over processes."""

import pytest
import vocab_parallel_fused_linear_log_probs_cases as cases
from process_group import run_case
from strategies import own_test_file
from torch.cuda import device_count

from liger_ops.reference import operators

WHOLE = own_test_file(operators()["fused_linear_log_probs"])
precision = WHOLE.precision


def noise(op, group, classes, class_sizes, sequence_dim, **arguments):
    return WHOLE.noise(op.removeprefix("vocab_parallel_"), **arguments)


def vary(draw, arguments):
    """For test_properties.py: the terms of this mean may cancel."""
    arguments["mean_logits"] = False
    if arguments["classes"] == 1:  # 0, but for the last bit of tanh, which ATen computes after the exchange
        arguments["softcap"] = None


@pytest.mark.parametrize("case", cases.CASES.parameters())
def test_every_rank_computes_the_results_of_all_classes(case):
    run_case(case, cases, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES.parameters(cases.ON_GPUS))
def test_every_gpu_computes_the_results_of_all_classes(case):
    """With one GPU, in a group of one process."""
    run_case(case, cases, min(device_count(), 4), "cuda")
