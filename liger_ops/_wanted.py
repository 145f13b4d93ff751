"""Bits of the argument `wanted` of private operators."""

# Gradients, as in csrc/core/autograd.h.
WANT_INPUT, WANT_WEIGHT, WANT_BIAS = 1, 2, 4

# Of fused_linear_cross_entropy: results, and gradients, as in csrc/ops/losses/fused_linear_cross_entropy.h.
CE_METRICS, CE_LOG_PROBS, CE_INPUT, CE_WEIGHT, CE_BIAS = 1, 2, 4, 8, 16
