#pragma once

// Functions for vectorized CPU loops, without calls: compilers vectorize those of the C library's exp and erf only if
// the whole program is built with -ffast-math.

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/cpu/half.h"

namespace liger::core {

/// Within 2 ulp; 0, infinity and NaN where std::exp gives them.
inline float vector_exp(float x) {
  // Beyond these bounds the result is 0 or infinity; NaN fails both comparisons and stays.
  x = x < -104.f ? -104.f : x;
  x = x > 89.f ? 89.f : x;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  // ln 2 is split in two. The first part has few significant bits, so n times it is exact and r keeps full precision.
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.f;
  const int32_t exponent = int32_t(detail::bits_of(shifted)) - int32_t(detail::bits_of(kRound));
  // Multiply by 2^n in two steps: 2^n alone may overflow or underflow where the product does not.
  const int32_t half = exponent >> 1, rest = exponent - half;
  // x may be NaN, and its exponent anything.
  auto power_of_two = [](int32_t n) { return detail::float_of(uint32_t(n + 127) << 23); };
  return p * power_of_two(half) * power_of_two(rest);
}

inline double vector_exp(double x) { return std::exp(x); }

/// Within 2 ulp, for x >= 0; -infinity at 0, NaN below.
inline float vector_log(float x) {
  constexpr float kLeastNormal = 1.17549435e-38f, kInfinity = std::numeric_limits<float>::infinity();
  const float normal = x < kLeastNormal ? x * 8388608.f : x;
  // normal = 2^exponent m, with m from sqrt(1/2) to sqrt(2)
  const uint32_t offset = detail::bits_of(normal) - 0x3F3504F3, shifted = offset & 0xFF800000;
  const float m = detail::float_of(detail::bits_of(normal) - shifted);
  const float exponent = float(int32_t(shifted) >> 23) - (x < kLeastNormal ? 23.f : 0.f);
  // log m = 2 atanh s
  const float s = (m - 1) / (m + 1), z = s * s;
  float p = 1.f / 9;
  p = p * z + 1.f / 7;
  p = p * z + 1.f / 5;
  p = p * z + 1.f / 3;
  // ln 2 in two parts: the first times an exponent is exact.
  const float low = exponent * -2.12194440e-4f + 2 * s * z * p;
  float y = exponent * 0.693359375f + (2 * s + low);
  y = x < kInfinity ? y : x;
  y = x == 0 ? -kInfinity : y;
  return x < 0 ? std::numeric_limits<float>::quiet_NaN() : y;
}

inline double vector_log(double x) { return std::log(x); }

/// log(1 + x) for finite x > -1. The division corrects the rounding of 1 + x.
inline float vector_log1p(float x) {
  const float u = 1 + x, lost = u - 1;
  return lost == 0 ? x : vector_log(u) * (x / lost);
}

inline double vector_log1p(double x) { return std::log1p(x); }

/// exp(x) - 1 - x for |x| < 1 / 2.
inline float expm1_less_x(float x) {
  const float bend = 1.f / 24 + x * (1.f / 120 + x * (1.f / 720 + x * (1.f / 5040 + x * (1.f / 40320))));
  return x * x * (0.5f + x * (1.f / 6 + x * bend));
}

template <class C>
C vector_sigmoid(C x) {
  return 1 / (1 + vector_exp(-x));
}

template <class C>
struct Sigmoid {
  C value, slope;
};

/// The sigmoid and its derivative. value * (1 - value) would lose precision.
template <class C>
Sigmoid<C> vector_sigmoid_and_slope(C x) {
  const C e = vector_exp(-std::fabs(x)), r = 1 / (1 + e);
  return {x < 0 ? e * r : r, e * r * r};
}

template <class C>
struct Normal {
  C cdf, pdf;
};

/// The standard normal distribution at x. Near 0, cdf(x) - 1/2 is a Taylor series in x. Further out, cdf(-t) = exp(-t^2
/// / 2) * u * P(u) with u = 1 / (1 + 0.31 t), where P is a minimax fit of degree 9 with relative error 1.2e-8.
inline Normal<float> vector_normal(float x) {
  const float square = x * x, t = std::fabs(x), u = 1 / (1 + 0.31f * t), e = vector_exp(-0.5f * square);
  constexpr float kScale = 0.3989422804f;  // 1 / sqrt(2 pi)
  // The coefficient of x^(2 k + 1) is (-1)^k / (2^k k! (2 k + 1)).
  float center = -1.f / 9676800;
  center = center * square + 1.f / 599040;
  center = center * square - 1.f / 42240;
  center = center * square + 1.f / 3456;
  center = center * square - 1.f / 336;
  center = center * square + 1.f / 40;
  center = center * square - 1.f / 6;
  center = (center * square + 1) * (kScale * x) + 0.5f;
  float p = -0.0208494584f;
  p = p * u + 0.1035549989f;
  p = p * u - 0.1840230185f;
  p = p * u + 0.1191368934f;
  p = p * u - 0.0343221258f;
  p = p * u + 0.0719880457f;
  p = p * u + 0.0850817249f;
  p = p * u + 0.1121071127f;
  p = p * u + 0.1236532598f;
  p = p * u + 0.1236725617f;
  const float tail = p * u * e, cdf = x < 0 ? tail : 1 - tail;
  return {t < 1 ? center : cdf, kScale * e};
}

inline Normal<double> vector_normal(double x) {
  return {0.5 * std::erfc(-x * 0.70710678118654752), 0.39894228040143268 * std::exp(-0.5 * x * x)};
}

}  // namespace liger::core
