#pragma once

// Rotation of one head on CPU.

#include <tuple>
#include <utility>
#include <vector>

#include "core/cpu.h"
#include "ops/rope/angles.h"

namespace liger::ops::rope {

// The angles of one position: those of the pairs' first columns, then those of the second columns.
template <class C>
struct PairAngles {
  explicit PairAngles(int64_t half) : half(half), cos(2 * half), sin(2 * half) {}
  int64_t half;
  std::vector<C> cos, sin;

  template <class W>
  void load(const Angles& a, bool inverse, int64_t b, int64_t s) {
    const int64_t start = b * a.batch + s * a.position;
    const W *cos_at = a.cos.const_data_ptr<W>() + start, *sin_at = a.sin.const_data_ptr<W>() + start;
    for (int64_t i = 0; i < half; ++i) {
      const int64_t section = ((i >= a.section_1) + (i >= a.section_2)) * a.section;
      const int64_t first = section + i * a.next, second = first + a.second;
      cos[i] = C(cos_at[first]);
      cos[half + i] = C(cos_at[a.is_complex ? first : second]);
      sin[i] = C(sin_at[a.is_complex ? second : first]);
      sin[half + i] = C(sin_at[second]);
      if (inverse) std::tie(sin[i], sin[half + i]) = std::make_pair(-sin[half + i], -sin[i]);
    }
  }
};

// Pairs are columns (2 i, 2 i + 1) or (i, i + half), of x and of y. If these are the same, y may be x.
template <class C>
void rotate_row(C* y, const C* x, const PairAngles<C>& angles, bool x_pairs, bool y_pairs) {
  const int64_t half = angles.half;
  const C *cos = angles.cos.data(), *sin = angles.sin.data();
  if (x_pairs != y_pairs) {
    const int64_t x_next = x_pairs ? 2 : 1, x_second = x_pairs ? 1 : half;
    const int64_t y_next = y_pairs ? 2 : 1, y_second = y_pairs ? 1 : half;
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const C a = x[x_next * i], b = x[x_next * i + x_second];
      y[y_next * i] = a * cos[i] - b * sin[i];
      y[y_next * i + y_second] = b * cos[half + i] + a * sin[half + i];
    }
  } else if (x_pairs) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const C a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = a * cos[i] - b * sin[i];
      y[2 * i + 1] = b * cos[half + i] + a * sin[half + i];
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const C a = x[i], b = x[half + i];
      y[i] = a * cos[i] - b * sin[i];
      y[half + i] = b * cos[half + i] + a * sin[half + i];
    }
  }
}

}  // namespace liger::ops::rope
