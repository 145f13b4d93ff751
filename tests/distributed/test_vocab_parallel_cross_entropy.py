"""For test_properties.py; test_vocab_parallel.py has the tests."""

from solo_group import solo_group


def vary(draw, arguments):
    """For test_properties.py."""
    arguments |= dict(group=solo_group(), classes=arguments["logits"].shape[-1])
