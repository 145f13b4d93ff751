"""For test_properties.py; test_vocab_parallel.py has the tests."""

from solo_group import solo_group
from strategies import own_test_file

from liger_ops.reference import operators

WHOLE = own_test_file(operators()["fused_linear_divergence"])
precision = WHOLE.precision


def vary(draw, arguments):
    """For test_properties.py."""
    arguments["vocab_map"] = None


def noise(op, group, classes, class_sizes, sequence_dim, vocab_map, **arguments):
    return WHOLE.noise(op, **arguments)
