#pragma once

// Rows of logits on CPU, a block of columns at a time. Loops over a block take numbers of the compute type, whatever the
// storage is: GCC copies loops that surround a choice of conversions, and vectorizes one copy.

#include <cmath>
#include <cstring>
#include <type_traits>

#include "core/cpu/loops.h"
#include "core/cpu/math.h"

// Between these, functions may compute both results of a choice. Otherwise GCC does not vectorize many loops with one. Loops
// are LIGER_VECTORIZED there, because vectorized() does not inline them.
#if defined(__GNUC__) && !defined(__clang__)
#define LIGER_SPECULATIVE _Pragma("GCC push_options") _Pragma("GCC optimize(\"no-trapping-math\")")
#define LIGER_END_SPECULATIVE _Pragma("GCC pop_options")
#else
#define LIGER_SPECULATIVE
#define LIGER_END_SPECULATIVE
#endif

namespace liger::core {

/// Columns of a block.
constexpr int64_t kStage = 512;

/// The first number of a row.
template <class C>
C number(Input<C> x) {
  C stage;
  return *widen_all(x, &stage, 1);
}

template <class C>
void clear(Output<C> out, int64_t n) {
  std::memset(out.data, 0, size_t(n) * (out.storage == Storage::compute ? sizeof(C) : 2));
}

/// widen_all() and store_all() outside of vectorized loops.
template <class C>
const C* load(Input<C> x, C* stage, int64_t n) {
  if (x.storage == Storage::compute) return static_cast<const C*>(x.data);
  return vectorized<C>([=] { return widen_all(x, stage, n); });
}
template <class C>
void store(Output<C> out, const C* from, int64_t n) {
  vectorized<C>([=] { store_all(out, from, n); });
}

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

/// Not inlined, because contracting it with a subtraction of the peak would leave a rounding error where both are equal.
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

struct Powers {
  double total = 0, spread = 0, pull = 0;
};

namespace detail {

template <class C>
void add_and_scale(C* out, const C* x, const C* bias, C scale, int64_t n) {
  if (bias) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = (x[i] + bias[i]) * scale;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
  }
}

template <class C>
C largest(const C* v, int64_t n, C start) {
  C out = start;
#pragma omp simd reduction(max : out)
  for (int64_t i = 0; i < n; ++i) out = v[i] > out ? v[i] : out;
  return out;
}

}  // namespace detail

LIGER_SPECULATIVE

/// exp of this is 0; the limit avoids 0 * -inf.
template <class C>
C exponent(C x) {
  return x < -1000 ? C(-1000) : x;
}

template <class C>
C gap_of(C v, C other) {
  return v == other ? C(0) : v - other;
}

/// Adds e = exp(away), e * away and, unless `other` is nullptr, e times the gap to it.
template <class C, class Other>
LIGER_VECTORIZED void add_powers(const C* v, Other other, int64_t n, C peak, C inverse, Powers& sums) {
  constexpr bool kPulls = !std::is_null_pointer_v<Other>;
  C total = 0, spread = 0, pull = 0;
#pragma omp simd reduction(+ : total, spread, pull)
  for (int64_t i = 0; i < n; ++i) {
    const C away = exponent((v[i] - peak) * inverse), e = vector_exp(away);
    C gap = 0;
    if constexpr (kPulls) gap = gap_of(v[i], other[i]);
    total += e;
    spread += e * away;
    if constexpr (kPulls) pull += e == 0 ? C(0) : e * gap;
  }
  sums.total += total;
  sums.spread += spread;
  sums.pull += pull;
}

/// widen_all() and narrow_all(), which speculative functions do not inline.
template <class C>
const C* widen_block(Input<C> x, C* stage, int64_t n) {
  if constexpr (std::is_same_v<C, float>) {
    if (x.storage == Storage::bfloat16) {
      const auto* from = static_cast<const c10::BFloat16*>(x.data);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) stage[i] = widen(from[i]);
      return stage;
    }
  }
  return widen_all(x, stage, n);
}
template <class C>
void narrow_block(Output<C> out, const C* stage, int64_t n) {
  if constexpr (std::is_same_v<C, float>) {
    if (out.storage == Storage::bfloat16) {
      auto* to = static_cast<c10::BFloat16*>(out.data);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) to[i].x = narrow<c10::BFloat16>(stage[i]).x;
      return;
    }
  }
  narrow_all(out, stage, n);
}

LIGER_END_SPECULATIVE

/// Of v and `start`.
template <class C>
C largest(const C* v, int64_t n, C start) {
  return vectorized<C>([&] { return detail::largest(v, n, start); });
}

/// A row of logits: the softcap of (x + bias) * scale.
template <class C>
struct Logits {
  Input<C> x;
  const C* bias;  // may be null
  C scale, cap;  // cap: 0 without a softcap

  C capped(C v) const { return cap > 0 ? softcap(v, cap) : v; }

  /// `count` of them from column `first` on, in x or in the stage.
  const C* load_uncapped(int64_t first, int64_t count, C* stage) const {
    const C *v = core::load(x + first, stage, count), *b = bias ? bias + first : nullptr;
    if (!b && scale == 1) return v;
    vectorized<C>([&] { detail::add_and_scale(stage, v, b, scale, count); });
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

}  // namespace liger::core
