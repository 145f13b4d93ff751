#pragma once

// Branch-free half-precision conversions for CPU loops, which compilers vectorize. c10's own conversions contain a
// branch for NaN or a call, so a loop with one of them runs element by element.

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace liger::core {

namespace detail {

inline uint32_t bits_of(float x) {
  uint32_t out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}

inline float float_of(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

inline uint32_t bits_of(c10::Half x) { return x.x; }
inline uint32_t bits_of(c10::BFloat16 x) { return x.x; }

}  // namespace detail

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(c10::BFloat16 x) { return detail::float_of(detail::bits_of(x) << 16); }

inline float widen(c10::Half x) {
  constexpr uint32_t kRebias = (127 - 15) << 23, kLeastNormal = (127 - 14) << 23;
  const uint32_t bits = detail::bits_of(x), size = (bits & 0x7FFF) << 13;
  const uint32_t normal = size + kRebias;
  const uint32_t special = normal + kRebias;  // infinity and NaN: the largest exponent stays the largest
  const uint32_t subnormal = detail::bits_of(detail::float_of(size + kLeastNormal) - detail::float_of(kLeastNormal));
  const uint32_t magnitude = size < (1u << 23) ? subnormal : size >= (31u << 23) ? special : normal;
  return detail::float_of(magnitude | (bits & 0x8000) << 16);
}

/// Rounds to nearest, ties to even.
template <class T, class C>
T narrow(C x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const uint32_t bits = detail::bits_of(x), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return T(uint16_t(x != x ? 0x7FC0 : rounded), T::from_bits());
  } else if constexpr (std::is_same_v<T, c10::Half>) {
    constexpr uint32_t kRebias = (127 - 15) << 23, kLeastNormal = (127 - 14) << 23, kOverflow = (127 + 16) << 23;
    const uint32_t bits = detail::bits_of(x), size = bits & 0x7FFFFFFF;
    // Below the smallest normal number, adding 1/2 leaves the rounded result in the low bits.
    const uint32_t subnormal = detail::bits_of(detail::float_of(size) + 0.5f) - detail::bits_of(0.5f);
    const uint32_t normal = (size - kRebias + 0xFFF + (size >> 13 & 1)) >> 13;
    const uint32_t special = size > 0x7F800000 ? 0x7E00 : 0x7C00;
    const uint32_t magnitude = size < kLeastNormal ? subnormal : size >= kOverflow ? special : normal;
    return T(uint16_t(magnitude | (bits >> 16 & 0x8000)), T::from_bits());
  } else {
    return T(x);
  }
}

/// x rounded to T.
template <class T, class C>
C round_to(C x) {
  return C(widen(narrow<T>(x)));
}

/// n numbers, by the processor's conversions if it has them. Compilers do not generate those.
void widen_half(const c10::Half* x, float* out, int64_t n);
void narrow_half(c10::Half* out, const float* x, int64_t n);

}  // namespace liger::core
