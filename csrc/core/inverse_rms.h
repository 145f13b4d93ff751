#pragma once

#include <cmath>

#include "core/cpu.h"

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

}  // namespace liger::core
