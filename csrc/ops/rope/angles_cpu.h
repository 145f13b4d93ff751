#pragma once

// Rotation of one head on CPU.

#include <vector>

#include "core/cpu/loops.h"
#include "core/cpu/storage.h"
#include "ops/rope/angles.h"

namespace liger::ops::rope {

// Loops over pairs are inlined with constant steps, because compilers do not vectorize them with others.

// The angles of one position: those of the pairs' first columns, then those of the second columns.
template <class C>
struct PairAngles {
  PairAngles(const Angles& a, bool inverse)
      : half(a.half),
        cos(2 * half),
        sin(2 * half),
        a(a),
        inverse(inverse),
        width(a.cos.size(-1)),
        cos_in(core::input<C>(a.cos)),
        sin_in(core::input<C>(a.sin)),
        cos_stage(core::make_stage<C>(cos_in.storage, width)),
        sin_stage(core::make_stage<C>(sin_in.storage, width)) {}

  void load(int64_t b, int64_t s) {
    const int64_t bounds[] = {0, a.section_1, a.section_2, half};
    // A pair has an angle for each column, or a complex one: its cosine, then its sine.
    const int64_t cos_2 = a.is_complex ? 0 : a.second, sin_1 = a.second - cos_2, sin_2 = a.second;
    C *to_cos = cos.data(), *to_sin = sin.data();
    for (int64_t section = 0; section < 3; ++section) {
      const int64_t begin = bounds[section], end = bounds[section + 1];
      if (begin == end) continue;
      const int64_t start = b * a.batch + s * a.position + section * a.section;
      const C* from_cos = core::widen_all(cos_in + start, cos_stage.data(), width);
      const C* from_sin = core::widen_all(sin_in + start, sin_stage.data(), width);
      const auto copy = [&](int64_t next) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
          const C first = from_sin[next * i + sin_1], second = from_sin[next * i + sin_2];
          to_cos[i] = from_cos[next * i];
          to_cos[half + i] = from_cos[next * i + cos_2];
          to_sin[i] = inverse ? -second : first;
          to_sin[half + i] = inverse ? -first : second;
        }
      };
      a.next == 1 ? copy(1) : copy(2);
    }
  }

  const int64_t half;
  std::vector<C> cos, sin;

 private:
  const Angles& a;
  const bool inverse;
  const int64_t width;
  const core::Input<C> cos_in, sin_in;
  std::vector<C> cos_stage, sin_stage;
};

// Pairs are columns (2 i, 2 i + 1) or (i, i + half), of x and of y. If these are the same, y may be x.
template <class C>
void rotate_row(C* y, const C* x, const PairAngles<C>& angles, bool x_pairs, bool y_pairs) {
  const int64_t half = angles.half;
  const C *cos = angles.cos.data(), *sin = angles.sin.data();
  const auto rotate = [&](int64_t x_next, int64_t x_second, int64_t y_next, int64_t y_second) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const C a = x[x_next * i], b = x[x_next * i + x_second];
      y[y_next * i] = a * cos[i] - b * sin[i];
      y[y_next * i + y_second] = b * cos[half + i] + a * sin[half + i];
    }
  };
  if (x_pairs) {
    y_pairs ? rotate(2, 1, 2, 1) : rotate(2, 1, 1, half);
  } else {
    y_pairs ? rotate(1, half, 2, 1) : rotate(1, half, 1, half);
  }
}

// Calls f(angles, b, s) for tokens from begin to end, with their angles.
template <class C, class F>
void for_tokens(const Heads& call, bool inverse, int64_t begin, int64_t end, const F& f) {
  PairAngles<C> angles(call.angles, inverse);
  const int64_t positions = call.positions();
  for (int64_t token = begin; token < end; ++token) {
    const int64_t b = token / positions, s = token - b * positions;
    angles.load(b, s);
    core::vectorized<C>([&] { f(angles, b, s); });
  }
}

}  // namespace liger::ops::rope
