#pragma once

#include <cmath>

#include "core/cpu/loops.h"

namespace liger::core {

/// 1 / sqrt(mean(x^2) + eps) of n numbers, on CPU.
template <class C>
C inverse_rms(const C* x, int64_t n, C eps) {
  double squares = 0;
  for (int64_t first = 0; first < n; first += kColumnsPerSum) {
    const int64_t count = std::min(kColumnsPerSum, n - first);
    const C* v = x + first;
    C part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t i = 0; i < count; ++i) part += v[i] * v[i];
    squares += part;
  }
  return C(1 / std::sqrt(squares / n + eps));
}

/// out = x * scale, rounded as a tensor of this storage would.
template <class C>
void scale_and_round(Storage storage, C* out, const C* x, C scale, int64_t n) {
  if (storage == Storage::bfloat16) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = round_to<c10::BFloat16>(x[i] * scale);
    return;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
  round_all(storage, out, n);
}

/// Calls f(rounded) once, where rounded(i) is x[i] * scale, rounded as a tensor of this storage would. stage: n numbers
template <class C, class F>
void with_rounded(Storage storage, const C* x, C scale, C* stage, int64_t n, const F& f) {
  if (storage == Storage::float16) {
    scale_and_round(storage, stage, x, scale, n);
    f([=](int64_t i) { return stage[i]; });
  } else if (storage == Storage::bfloat16) {
    f([=](int64_t i) { return round_to<c10::BFloat16>(x[i] * scale); });
  } else {
    f([=](int64_t i) { return x[i] * scale; });
  }
}

}  // namespace liger::core
