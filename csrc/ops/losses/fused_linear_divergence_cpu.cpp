// Rows of fused_linear_divergence on CPU. The formulas are those of liger_ops/kernels/losses/fused_linear_divergence.py.

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "core/cpu.h"
#include "core/cpu_math.h"
#include "ops/losses/fused_linear_divergence_rows.h"

#if defined(__GNUC__) && !defined(__clang__)
// Otherwise GCC does not vectorize loops with a choice between two results, because it would compute both.
#pragma GCC optimize("no-trapping-math")
#endif

namespace liger::ops::fused_linear_divergence {
namespace {

constexpr int64_t kStage = 512;

/// The logits of one model in a row.
template <class C>
struct Side {
  const C *x, *bias;
  C scale, cap;  // cap: 0 without a softcap

  /// `count` values v from column `first` on.
  void load(int64_t first, int64_t count, C* v) const {
    for (int64_t i = 0; i < count; ++i) v[i] = (x[first + i] + (bias ? bias[first + i] : C(0))) * scale;
    for (int64_t i = 0; cap > 0 && i < count; ++i) v[i] = cap * std::tanh(v[i] / cap);
  }

  /// The softcap's derivative, without the cancellation of 1 - tanh^2.
  C slope(int64_t column) const {
    const C y = (x[column] + (bias ? bias[column] : C(0))) * scale, e = std::exp(-2 * std::fabs(y / cap));
    return 4 * e / ((1 + e) * (1 + e));
  }
};

template <class C>
struct Stats {
  C s_peak, s_total, t_peak, t_total, mean;
};

/// What the elements of a row need.
template <class C>
struct Row {
  C s_peak, t_peak, of_s, of_t, offset, inverse, beta, mean;

  Row(const Stats<C>& of, C temperature, C weight)
      : s_peak(of.s_peak),
        t_peak(of.t_peak),
        of_s(1 / of.s_total),
        of_t(1 / of.t_total),
        offset((of.s_peak - of.t_peak) + std::log(of.s_total / of.t_total) * temperature),
        inverse(1 / temperature),
        beta(weight),
        mean(of.mean) {}
};

/// exp of this is 0; the limit avoids 0 * -inf.
template <class C>
C at_least(C x) {
  return x < -1000 ? C(-1000) : x;
}

template <class C>
C gap_of(C v_s, C v_t) {
  return v_s == v_t ? C(0) : v_s - v_t;
}

// Below this, series replace exponentials.
constexpr float kNear = 0.5f;

inline float series_expm1(float x) { return x + core::expm1_less_x(x); }
inline double series_expm1(double x) { return std::expm1(x); }

inline float relative_entropy(float p, float q, float x) {
  const float bend = 1.f / 120 - x * (1.f / 720 - x * (1.f / 5040 - x * (1.f / 40320)));
  const float near = p * x * x * (0.5f - x * (1.f / 6 - x * (1.f / 24 - x * bend)));
  const float far = (p == 0 ? 0.f : p * (x - 1)) + q;
  return std::fabs(x) < kNear ? near : far;
}
inline double relative_entropy(double p, double q, double x) { return (p == 0 ? 0 : p * (x - 1)) + q; }

template <class C>
struct Mixture {
  C value, level;
};

template <class C>
Mixture<C> mixture(C p_s, C p_t, C d, C beta) {
  const bool leads = d >= 0;
  const C size = std::fabs(d), share = leads ? beta : 1 - beta;
  // The ratio of the probabilities, and that less 1.
  const C small = series_expm1(-size), power = vector_exp(at_least(-size));
  const C ratio = size < C(kNear) ? 1 + small : power, lower = size < C(kNear) ? small : power - 1;
  const C log_m = vector_log1p(share * lower), low = share * ratio;
  const C value = -log_m * (1 - share + low) - (low == 0 ? C(0) : low * size);
  return {(leads ? p_s : p_t) * value, leads ? log_m : log_m + size};
}

template <class C>
LIGER_VECTORIZED C largest(const C* v, int64_t n, C start) {
  C out = start;
#pragma omp simd reduction(max : out)
  for (int64_t i = 0; i < n; ++i) out = v[i] > out ? v[i] : out;
  return out;
}

struct Sums {
  double total = 0, spread = 0, pull = 0;
};

/// Adds exp(away), and that times away and times the gap to `other`.
template <class C>
LIGER_VECTORIZED void add_powers(const C* v, const C* other, int64_t n, C peak, C inverse, Sums& sums) {
  C total = 0, spread = 0, pull = 0;
#pragma omp simd reduction(+ : total, spread, pull)
  for (int64_t i = 0; i < n; ++i) {
    const C away = at_least((v[i] - peak) * inverse), e = vector_exp(away), gap = gap_of(v[i], other[i]);
    total += e;
    spread += e * away;
    pull += e == 0 ? C(0) : e * gap;
  }
  sums.total += total;
  sums.spread += spread;
  sums.pull += pull;
}

template <int32_t kKind, class C>
LIGER_VECTORIZED void add_values(
    const C* v_s, const C* v_t, int64_t n, const Row<C>& row, double& divergence, double& mean) {
  C total = 0, of_mean = 0;
#pragma omp simd reduction(+ : total, of_mean)
  for (int64_t i = 0; i < n; ++i) {
    const C p_s = vector_exp(at_least((v_s[i] - row.s_peak) * row.inverse)) * row.of_s;
    const C p_t = vector_exp(at_least((v_t[i] - row.t_peak) * row.inverse)) * row.of_t;
    const C d = (gap_of(v_s[i], v_t[i]) - row.offset) * row.inverse;
    if constexpr (kKind == kinds::FORWARD) {
      total += relative_entropy(p_t, p_s, -d);
    } else if constexpr (kKind == kinds::REVERSE) {
      total += relative_entropy(p_s, p_t, d);
    } else {
      const auto [value, level] = mixture(p_s, p_t, d, row.beta);
      total += value;
      of_mean -= p_s == 0 ? C(0) : p_s * level;
    }
  }
  divergence += total;
  mean += of_mean;
}

template <int32_t kKind, class C>
LIGER_VECTORIZED void write_gradient(C* out, const C* v_s, const C* v_t, int64_t n, const Row<C>& row, C g) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const C p_s = vector_exp(at_least((v_s[i] - row.s_peak) * row.inverse)) * row.of_s;
    const C p_t = vector_exp(at_least((v_t[i] - row.t_peak) * row.inverse)) * row.of_t;
    const C gap = gap_of(v_s[i], v_t[i]), d = (gap - row.offset) * row.inverse;
    C slope;
    if constexpr (kKind == kinds::FORWARD) {
      slope = std::fabs(d) < C(kNear) ? p_t * series_expm1(d) : p_s - p_t;
    } else if constexpr (kKind == kinds::REVERSE) {
      slope = p_s == 0 ? C(0) : p_s * ((gap - row.mean) * row.inverse);
    } else {
      slope = p_s == 0 ? C(0) : p_s * ((row.beta - 1) * (mixture(p_s, p_t, d, row.beta).level + row.mean));
    }
    out[i] = slope * g;
  }
}

/// Calls f(first column, columns, v_s, v_t) on the row, piece by piece.
template <class C, class F>
void for_columns(const Side<C>& s, const Side<C>& t, int64_t n, const F& f) {
  C v_s[kStage], v_t[kStage];
  for (int64_t first = 0; first < n; first += kStage) {
    const int64_t count = std::min(kStage, n - first);
    s.load(first, count, v_s);
    t.load(first, count, v_t);
    f(first, count, v_s, v_t);
  }
}

template <int32_t kKind, class C, class T>
struct CpuRows {
  const Rows& r;
  const int64_t n = r.student.size(1);
  const C temperature = C(r.o.temperature), beta = C(r.o.beta), inverse = 1 / temperature;

  Side<C> side(const Tensor& x, const Tensor& bias, const Head& head, int64_t row) const {
    return {
        x.const_data_ptr<C>() + row * x.stride(0), data_or_null<C>(bias), C(head.scale), C(head.softcap.value_or(0))};
  }

  void run(int64_t row) const {
    const bool adds = r.phase == Phase::All || r.phase == Phase::Values;
    C* saved = data_or_null<C>(r.stats);
    const int64_t stride = r.stats.defined() ? r.stats.stride(0) : 0;
    T* out = r.dlogits.defined() ? r.dlogits.data_ptr<T>() + row * r.dlogits.stride(0) : nullptr;
    if (r.mask.defined() && !r.mask.const_data_ptr<bool>()[row]) {
      if (out) std::fill_n(out, n, T(0));
      if (adds) r.divergence.data_ptr<C>()[row] = 0;
      if (r.phase != Phase::All) return;
      r.entropy.data_ptr<C>()[row] = 0;
      for (int i = 0; saved && i < 5; ++i) saved[i * stride + row] = 0;
      return;
    }
    const Side<C> s = side(r.student, r.s_bias, r.o.student, row), t = side(r.teacher, r.t_bias, r.o.teacher, row);
    Stats<C> of;
    if (r.phase == Phase::Values || r.phase == Phase::Write) {
      of = {saved[row], saved[stride + row], saved[2 * stride + row], saved[3 * stride + row], saved[4 * stride + row]};
    } else {
      const Facts facts = scan(s, t);
      if (r.phase == Phase::Scan) {
        std::transform(facts.begin(), facts.end(), r.facts.data_ptr<C>() + row * kinds::SHARES, [](double fact) {
          return C(fact);
        });
        return;
      }
      const auto [s_peak, s_total, spread, pull, t_peak, t_total] = facts;
      r.entropy.data_ptr<C>()[row] = C(std::log(s_total) - spread / s_total);
      of = {C(s_peak), C(s_total), C(t_peak), C(t_total), C(pull / s_total)};
    }
    if (adds) {
      double divergence = 0, mean = 0;
      for_columns(s, t, n, [&](int64_t, int64_t count, const C* v_s, const C* v_t) {
        add_values<kKind>(v_s, v_t, count, Row<C>(of, temperature, beta), divergence, mean);
      });
      r.divergence.data_ptr<C>()[row] = C(divergence);
      if (kKind == kinds::MIXTURE) of.mean = C(mean);
      const C numbers[] = {of.s_peak, of.s_total, of.t_peak, of.t_total, of.mean};
      for (int i = 0; saved && i < 5; ++i) saved[i * stride + row] = numbers[i];
    }
    if (!out) return;
    const C g = r.grad.defined() ? r.grad.const_data_ptr<C>()[row] : C(1);
    C slopes[kStage];
    for_columns(s, t, n, [&](int64_t first, int64_t count, const C* v_s, const C* v_t) {
      write_gradient<kKind>(slopes, v_s, v_t, count, Row<C>(of, temperature, beta), g * inverse);
      for (int64_t i = 0; s.cap > 0 && i < count; ++i) slopes[i] *= s.slope(first + i);
      for (int64_t i = 0; i < count; ++i) out[first + i] = narrow<T>(slopes[i]);
    });
  }

  /// In the order of the kernel's shares.
  using Facts = std::array<double, size_t(kinds::SHARES)>;

  Facts scan(const Side<C>& s, const Side<C>& t) const {
    constexpr C kLowest = std::numeric_limits<C>::lowest();
    C s_peak = kLowest, t_peak = kLowest;
    for_columns(s, t, n, [&](int64_t, int64_t count, const C* v_s, const C* v_t) {
      s_peak = largest(v_s, count, s_peak);
      t_peak = largest(v_t, count, t_peak);
    });
    Sums of_s, of_t;
    for_columns(s, t, n, [&](int64_t, int64_t count, const C* v_s, const C* v_t) {
      add_powers(v_s, v_t, count, s_peak, inverse, of_s);
      add_powers(v_t, v_s, count, t_peak, inverse, of_t);
    });
    return {double(s_peak), of_s.total, of_s.spread, of_s.pull, double(t_peak), of_t.total};
  }
};

/// Calls f(std::integral_constant<kind>).
template <class F>
void with_kind(int32_t kind, const F& f) {
  switch (kind) {
    case kinds::FORWARD: return f(std::integral_constant<int32_t, kinds::FORWARD>());
    case kinds::REVERSE: return f(std::integral_constant<int32_t, kinds::REVERSE>());
    default: return f(std::integral_constant<int32_t, kinds::MIXTURE>());
  }
}

template <class C, class T>
void run_rows(const Rows& r) {
  with_kind(r.o.kind(), [&](auto kind) {
    const CpuRows<decltype(kind)::value, C, T> rows{r};
    const int64_t count = r.student.size(0);
    parallel_ranges(count, cpu_ranges(count, rows.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) rows.run(row);
    });
  });
}

}  // namespace

void rows_cpu(Rows& r) {
  if (r.phase == Phase::Scan) r.facts = at::empty({r.student.size(0), 1, int64_t(kinds::SHARES)}, r.student.options());
  const auto type = r.dlogits.defined() ? r.dlogits.scalar_type() : r.student.scalar_type();
  const bool wide = r.student.scalar_type() == at::kDouble;
  dispatch_activation_parameter(type, type, [&](auto zero, auto) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, double>) {
      run_rows<double, double>(r);
    } else {
      wide ? run_rows<double, T>(r) : run_rows<float, T>(r);
    }
  });
}

}  // namespace liger::ops::fused_linear_divergence
