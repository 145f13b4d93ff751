"""For test_properties.py; test_vocab_parallel.py has the tests."""

import linear_losses
from solo_group import solo_group
from strategies import has_low_rank

precision = linear_losses.precision


def noise(op, group, classes, class_sizes, sequence_dim, **arguments):
    return linear_losses.noise(op.removeprefix("vocab_parallel_"), **arguments)


def vary(draw, arguments):
    """For test_properties.py."""
    has_low_rank(draw, arguments)
    arguments |= dict(group=solo_group(), classes=arguments["weight"].shape[0])
