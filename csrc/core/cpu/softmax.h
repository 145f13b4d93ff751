#pragma once

// Rows of logits on CPU, a block of columns at a time.

#include <cmath>
#include <limits>
#include <type_traits>

#include "core/cpu/loops.h"
#include "core/cpu/math.h"

namespace liger::core {

/// Calls f(first, count, v) on n numbers of a row: at once, or block by block if they are converted.
template <class C, class F>
void for_pieces(Input<C> x, int64_t n, const F& f) {
  C stage[kStage];
  const int64_t piece = x.storage == Storage::compute ? n : kStage;
  for (int64_t first = 0; first < n; first += piece) {
    const int64_t count = std::min(piece, n - first);
    f(first, count, widen_all(x + first, stage, count));
  }
}

/// Not inlined: contracting it with a subtraction of the peak would leave a rounding error where both are equal.
template <class C>
C10_NOINLINE C softcap(C x, C cap) {
  return cap * std::tanh(x / cap);
}

/// The softcap's derivative, without the cancellation of 1 - tanh^2.
template <class C>
C softcap_slope(C x, C cap) {
  const C e = std::exp(-2 * std::fabs(x / cap));
  return 4 * e / ((1 + e) * (1 + e));
}

/// Of numbers x with e = exp(x): the sums of e, e * x, and e times a difference.
struct ExpSums {
  double total = 0, exponents = 0, differences = 0;
};

/// Of v and `start`.
template <class C>
C largest(const C* v, int64_t n, C start) {
  C out = start;
#pragma omp simd reduction(max : out)
  for (int64_t i = 0; i < n; ++i) out = v[i] > out ? v[i] : out;
  return out;
}

/// exp of this is 0; the limit avoids 0 * -inf.
template <class C>
C exponent(C x) {
  return x < -1000 ? C(-1000) : x;
}

/// v - other; 0 for equal infinities.
template <class C>
C difference_of(C v, C other) {
  return v == other ? C(0) : v - other;
}

/// Adds the terms of x = (v - peak) * inverse. Differences are v - other - shift; there are none without `other`, which
/// is nullptr then.
template <class C, class Other>
void add_exps(const C* v, Other other, C shift, int64_t n, C peak, C inverse, ExpSums& sums) {
  constexpr bool kHasOther = !std::is_null_pointer_v<Other>;
  C total = 0, exponents = 0, differences = 0;
#pragma omp simd reduction(+ : total, exponents, differences)
  for (int64_t i = 0; i < n; ++i) {
    const C x = exponent((v[i] - peak) * inverse), e = vector_exp(x);
    total += e;
    exponents += e * x;
    if constexpr (kHasOther) {
      const C difference = difference_of(v[i], other[i]);
      differences += e == 0 ? C(0) : e * (difference - shift);
    }
  }
  sums.total += total;
  sums.exponents += exponents;
  sums.differences += differences;
}

/// A row of logits: the softcap of (x + bias) * scale. They are loaded outside of vectorized functions: GCC would copy
/// these for each of the cases, and vectorize one copy of a sum.
template <class C>
struct Logits {
  Input<C> x;
  const C* bias;  // may be null
  C scale, cap;  // cap: 0 without a softcap

  C capped(C v) const { return cap > 0 ? softcap(v, cap) : v; }

  /// `count` of them from column `first` on, in x or in the stage.
  const C* load_uncapped(int64_t first, int64_t count, C* stage) const {
    const C* v = vectorized<C>([&] { return widen_all(x + first, stage, count); });
    if (!bias && scale == 1) return v;
    for (int64_t i = 0; i < count; ++i) stage[i] = (v[i] + (bias ? bias[first + i] : C(0))) * scale;
    return stage;
  }
  const C* load(int64_t first, int64_t count, C* stage) const {
    const C* v = load_uncapped(first, count, stage);
    if (!(cap > 0)) return v;
    for (int64_t i = 0; i < count; ++i) stage[i] = softcap(v[i], cap);
    return stage;
  }

  /// Multiplies gradients by the softcap's slopes.
  void multiply_by_slopes(C* gradient, int64_t first, int64_t count) const {
    if (!(cap > 0)) return;
    C stage[kStage];
    const C* v = load_uncapped(first, count, stage);
    for (int64_t i = 0; i < count; ++i) gradient[i] *= softcap_slope(v[i], cap);
  }
};

/// Calls f(first, count, v) on n logits, block by block.
template <class C, class F>
void for_blocks(const Logits<C>& x, int64_t n, const F& f) {
  C stage[kStage];
  for (int64_t first = 0; first < n; first += kStage) {
    const int64_t count = std::min(kStage, n - first);
    f(first, count, x.load(first, count, stage));
  }
}

/// The largest of n logits.
template <class C>
C peak_of(const Logits<C>& x, int64_t n) {
  C out = std::numeric_limits<C>::lowest();
  for_blocks(
      x, n, [&](int64_t, int64_t count, const C* v) { out = vectorized<C>([&] { return largest(v, count, out); }); });
  return out;
}

}  // namespace liger::core
