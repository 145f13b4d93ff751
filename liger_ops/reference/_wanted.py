"""The argument `wanted` of private operators: bit i asks for the i-th gradient, in the order of the operator's results.
Of a list of gradients, one bit asks for all."""

from typing import TypeVar

T = TypeVar("T")

# Of linear layers and losses. Beyond them are the gradients of low-rank inputs and weights.
WANT_INPUT, WANT_WEIGHT, WANT_BIAS = 1, 2, 4

# Above the gradients: results of fused_linear_cross_entropy, and of fused_linear_log_probs.
WANT_METRICS, WANT_LOG_PROBS = 32, 64
WANT_LOG_SUM_EXP = 32


def if_wanted(wanted: int, *gradients: T) -> list[T | None]:
    """None for those that are not wanted."""
    return [gradient if wanted >> i & 1 else None for i, gradient in enumerate(gradients)]
