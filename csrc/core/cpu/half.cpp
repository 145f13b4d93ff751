#include "core/cpu/half.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#define LIGER_F16C __attribute__((target("avx,f16c")))
#endif

namespace liger::core {
namespace {

#ifdef LIGER_F16C
constexpr int64_t kLanes = 8;

bool has_f16c() {
  static const bool found = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  return found;
}

LIGER_F16C void widen_lanes(const c10::Half* x, float* out) {
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
}

LIGER_F16C void narrow_lanes(c10::Half* out, const float* x) {
  const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), halves);
}

LIGER_F16C void widen_f16c(const c10::Half* x, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) widen_lanes(x + i, out + i);
  if (i == n) return;
  c10::Half rest[kLanes] = {};
  float wide[kLanes];
  std::memcpy(rest, x + i, (n - i) * sizeof *x);
  widen_lanes(rest, wide);
  std::memcpy(out + i, wide, (n - i) * sizeof *out);
}

LIGER_F16C void narrow_f16c(c10::Half* out, const float* x, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) narrow_lanes(out + i, x + i);
  if (i == n) return;
  float rest[kLanes] = {};
  c10::Half halves[kLanes];
  std::memcpy(rest, x + i, (n - i) * sizeof *x);
  narrow_lanes(halves, rest);
  std::memcpy(out + i, halves, (n - i) * sizeof *out);
}
#endif

}  // namespace

void widen_half(const c10::Half* x, float* out, int64_t n) {
#ifdef LIGER_F16C
  if (has_f16c()) return widen_f16c(x, out, n);
#endif
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = widen(x[i]);
}

void narrow_half(c10::Half* out, const float* x, int64_t n) {
#ifdef LIGER_F16C
  if (has_f16c()) return narrow_f16c(out, x, n);
#endif
  // Assign the bits, because compilers do not vectorize copies of the struct.
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i].x = narrow<c10::Half>(x[i]).x;
}

}  // namespace liger::core
