"""Functions that keep the digits of small numbers."""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """log(1 + x) for x > -1. The division by u - 1 corrects the rounding of u = 1 + x."""
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def expm1_less_x(x):
    """exp(x) - 1 - x for |x| < 1 / 2."""
    bend = 1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * (1 / 40320))))
    return x * x * (1 / 2 + x * (1 / 6 + x * bend))
