"""Functions that keep the digits of small numbers, or that take few instructions."""

import triton
import triton.language as tl

from .rows import LOG2E

# Results of inline instructions are declared as integers for the tests' interpreter.


@triton.jit
def reciprocal(y):
    """1 / y for y >= 1. A division also handles the ends of fp32's range, which takes more instructions."""
    bits = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,f", [y], dtype=tl.int32, is_pure=True, pack=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(x):
    """2 ** x, or 0 if that is subnormal: to return it, tl.exp2 takes three more instructions."""
    bits = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sigmoid_of_power(power):
    """sigmoid(x) and its slope, for power = x * log2(e). The slope as s * (1 - s) would lose digits."""
    e = power_of_two(-power)
    s = reciprocal(1.0 + e)
    # If e overflows, s is 0, and their product NaN: the minimum with a number is that number.
    return s, s * tl.minimum(e * s, 1.0)


@triton.jit
def sigmoid_and_slope(x):
    return sigmoid_of_power(x * LOG2E)


@triton.jit
def sigmoid(x):
    s, _ = sigmoid_and_slope(x)
    return s


@triton.jit
def log1p_of_fraction(x):
    """log(1 + x) for 0 <= x <= 1: twice the area tangent of s = x / (2 + x) <= 1 / 3, in fewer registers than a logarithm."""
    s = x * reciprocal(2 + x)
    z = s * s
    series = 1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z * (1 / 15))))
    return 2 * s * (1 + z * (1 / 3 + z * (1 / 5 + z * series)))


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


@triton.jit
def normal(x):
    """The normal distribution's cdf at x, and exp(-x^2 / 2). (1 + erf) / 2 loses digits below 0.

    Near 0, cdf(x) - 1 / 2 = x * Q(x^2). Further out, cdf(-t) = exp(-t^2 / 2) * u * P(u) with u = 1 / (1 + 0.28 t). Q and P
    are minimax fits with relative errors of 4.1e-8 and 7.0e-8."""
    square, t = x * x, tl.abs(x)
    q = square * 0.000094235217 - 0.001169353672
    q = q * square + 0.009967196871
    q = q * square - 0.066489582721
    q = q * square + 0.398942264219
    u = reciprocal(tl.fma(t, 0.28, 1.0))
    p = u * -0.0591442701 + 0.1305863416
    p = p * u - 0.0027826936
    p = p * u + 0.1095955951
    p = p * u + 0.0976706106
    p = p * u + 0.1123235910
    p = p * u + 0.1116735797
    power = power_of_two(square * (-0.5 * LOG2E))
    tail = p * u * power
    return tl.where(t < 1, tl.fma(x, q, 0.5), tl.where(x < 0, tail, 1 - tail)), power
