"""Bits of the argument `wanted` of the norms' private backward operators, as in csrc/core/autograd.h."""

WANT_INPUT, WANT_WEIGHT, WANT_BIAS = 1, 2, 4
