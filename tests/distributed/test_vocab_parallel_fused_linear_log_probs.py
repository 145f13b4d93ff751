"""For test_properties.py; test_vocab_parallel.py has the tests."""

from solo_group import solo_group
from strategies import has_low_rank, own_test_file

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
