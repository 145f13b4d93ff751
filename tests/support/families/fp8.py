"""Sizes that the recipes of fp8_linear take."""

from liger_ops.reference.fp8_projections import multiple_of


def fitting(size: int, recipe: str) -> int:
    """At least `size`."""
    return -(-size // multiple_of(recipe)) * multiple_of(recipe)
