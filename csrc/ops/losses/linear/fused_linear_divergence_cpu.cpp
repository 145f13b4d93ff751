// Rows of fused_linear_divergence on CPU. Formulas are those of liger_ops/kernels/losses/fused_linear_divergence.py.

#include <algorithm>
#include <array>
#include <limits>

#include "core/cpu/softmax.h"
#include "ops/losses/linear/fused_linear_divergence_rows.h"

namespace liger::ops::fused_linear_divergence {
namespace {

template <class C>
struct Stats {
  C s_peak, s_total, t_peak, t_total, mean;
};

/// What the elements of a row need.
template <class C>
struct Row {
  C s_peak, t_peak, of_s, of_t, shift, offset, inverse, beta, mean;

  Row(const Stats<C>& of, C temperature, C weight)
      : s_peak(of.s_peak),
        t_peak(of.t_peak),
        of_s(1 / of.s_total),
        of_t(1 / of.t_total),
        shift(of.s_peak - of.t_peak),
        offset(shift + std::log(of.s_total / of.t_total) * temperature),
        inverse(1 / temperature),
        beta(weight),
        mean(of.mean) {}
};

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
  const C small = series_expm1(-size), power = vector_exp(exponent(-size));
  const C ratio = size < C(kNear) ? 1 + small : power, lower = size < C(kNear) ? small : power - 1;
  const C log_m = vector_log1p(share * lower), low = share * ratio;
  const C value = -log_m * (1 - share + low) - (low == 0 ? C(0) : low * size);
  return {(leads ? p_s : p_t) * value, leads ? log_m : log_m + size};
}

/// Calls f(std::integral_constant<kind>).
template <class F>
auto with_kind(int32_t kind, const F& f) {
  switch (kind) {
    case kinds::FORWARD: return f(std::integral_constant<int32_t, kinds::FORWARD>());
    case kinds::REVERSE: return f(std::integral_constant<int32_t, kinds::REVERSE>());
    default: return f(std::integral_constant<int32_t, kinds::MIXTURE>());
  }
}

template <class C>
void add_values(
    int32_t kind, const C* v_s, const C* v_t, int64_t n, const Row<C>& row, double& divergence, double& mean) {
  with_kind(kind, [&](auto k) {
    constexpr int32_t kKind = decltype(k)::value;
    C total = 0, of_mean = 0;
#pragma omp simd reduction(+ : total, of_mean)
    for (int64_t i = 0; i < n; ++i) {
      const C p_s = vector_exp(exponent((v_s[i] - row.s_peak) * row.inverse)) * row.of_s;
      const C p_t = vector_exp(exponent((v_t[i] - row.t_peak) * row.inverse)) * row.of_t;
      const C d = (difference_of(v_s[i], v_t[i]) - row.offset) * row.inverse;
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
  });
}

template <class C>
void write_gradient(int32_t kind, C* out, const C* v_s, const C* v_t, int64_t n, const Row<C>& row, C g) {
  with_kind(kind, [&](auto k) {
    constexpr int32_t kKind = decltype(k)::value;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const C p_s = vector_exp(exponent((v_s[i] - row.s_peak) * row.inverse)) * row.of_s;
      const C p_t = vector_exp(exponent((v_t[i] - row.t_peak) * row.inverse)) * row.of_t;
      const C d = (difference_of(v_s[i], v_t[i]) - row.offset) * row.inverse;
      C slope;
      if constexpr (kKind == kinds::FORWARD) {
        slope = std::fabs(d) < C(kNear) ? p_t * series_expm1(d) : p_s - p_t;
      } else if constexpr (kKind == kinds::REVERSE) {
        slope = p_s == 0 ? C(0) : p_s * (d - row.mean);
      } else {
        slope = p_s == 0 ? C(0) : p_s * ((row.beta - 1) * (mixture(p_s, p_t, d, row.beta).level + row.mean));
      }
      out[i] = slope * g;
    }
  });
}

/// Calls f(first column, columns, v_s, v_t) on the row, piece by piece.
template <class C, class F>
void for_columns(const Logits<C>& s, const Logits<C>& t, int64_t n, const F& f) {
  C stage[kStage];
  for_blocks(
      s, n, [&](int64_t first, int64_t count, const C* v_s) { f(first, count, v_s, t.load(first, count, stage)); });
}

template <class C>
struct CpuRows {
  const Rows& r;
  const int64_t n = r.student.size(1);
  const int32_t kind = r.o.kind();
  const C temperature = C(r.o.temperature), beta = C(r.o.beta), inverse = 1 / temperature;

  Logits<C> logits(const Tensor& x, const Tensor& bias, const Scaling& head, int64_t row) const {
    return {input<C>(x) + row * x.stride(0), const_data_or_null<C>(bias), C(head.scale), C(head.softcap.value_or(0))};
  }

  void run(int64_t row) const {
    const bool adds = r.phase == Phase::All || r.phase == Phase::Values;
    C* saved = data_or_null<C>(r.stats);
    const int64_t stride = r.stats.defined() ? r.stats.stride(0) : 0;
    const auto out = r.dlogits.defined() ? output<C>(r.dlogits) + row * r.dlogits.stride(0) : Output<C>();
    if (r.mask.defined() && !r.mask.const_data_ptr<bool>()[row]) {
      if (out) write_zeros(out, n);
      if (adds) r.divergence.data_ptr<C>()[row] = 0;
      if (r.phase != Phase::All) return;
      r.entropy.data_ptr<C>()[row] = 0;
      for (int i = 0; saved && i < 5; ++i) saved[i * stride + row] = 0;
      return;
    }
    const Logits<C> s = logits(r.student, r.s_bias, r.o.student, row);
    const Logits<C> t = logits(r.teacher, r.t_bias, r.o.teacher, row);
    Stats<C> of;
    if (r.phase == Phase::Values || r.phase == Phase::Write) {
      of = {saved[row], saved[stride + row], saved[2 * stride + row], saved[3 * stride + row], saved[4 * stride + row]};
    } else {
      const Shares shares = scan(s, t);
      if (r.phase == Phase::Scan) {
        std::transform(shares.begin(), shares.end(), r.facts.data_ptr<C>() + row * kinds::SHARES, [](double share) {
          return C(share);
        });
        return;
      }
      const auto [s_peak, s_total, exponents, differences, t_peak, t_total] = shares;
      r.entropy.data_ptr<C>()[row] = C(std::log(s_total) - exponents / s_total);
      of = {C(s_peak), C(s_total), C(t_peak), C(t_total), C(0)};
      const Row<C> numbers(of, temperature, beta);
      of.mean = C((differences / s_total - (double(numbers.offset) - numbers.shift)) * inverse);
    }
    if (adds) {
      double divergence = 0, mean = 0;
      const Row<C> numbers(of, temperature, beta);
      for_columns(s, t, n, [&](int64_t, int64_t count, const C* v_s, const C* v_t) {
        vectorized<C>([&] { add_values(kind, v_s, v_t, count, numbers, divergence, mean); });
      });
      r.divergence.data_ptr<C>()[row] = C(divergence);
      if (kind == kinds::MIXTURE) of.mean = C(mean);
      const C to_save[] = {of.s_peak, of.s_total, of.t_peak, of.t_total, of.mean};
      for (int i = 0; saved && i < 5; ++i) saved[i * stride + row] = to_save[i];
    }
    if (!out) return;
    const C g = r.grad.defined() ? r.grad.const_data_ptr<C>()[row] : C(1), factor = g * inverse;
    const Row<C> numbers(of, temperature, beta);
    C slopes[kStage];
    for_columns(s, t, n, [&](int64_t first, int64_t count, const C* v_s, const C* v_t) {
      vectorized<C>([&] { write_gradient(kind, slopes, v_s, v_t, count, numbers, factor); });
      s.multiply_by_slopes(slopes, first, count);
      vectorized<C>([&] { store_all(out + first, slopes, count); });
    });
  }

  /// In the order of the kernel's shares.
  using Shares = std::array<double, size_t(kinds::SHARES)>;

  Shares scan(const Logits<C>& s, const Logits<C>& t) const {
    const C s_peak = peak_of(s, n), t_peak = peak_of(t, n);
    ExpSums of_s, of_t;
    for_columns(s, t, n, [&](int64_t, int64_t count, const C* v_s, const C* v_t) {
      vectorized<C>([&] {
        add_exps(v_s, v_t, s_peak - t_peak, count, s_peak, inverse, of_s);
        add_exps(v_t, nullptr, C(0), count, t_peak, inverse, of_t);
      });
    });
    return {double(s_peak), of_s.total, of_s.exponents, of_s.differences, double(t_peak), of_t.total};
  }
};

}  // namespace

void rows_cpu(Rows& r) {
  if (r.phase == Phase::Scan) r.facts = at::empty({r.student.size(0), 1, int64_t(kinds::SHARES)}, r.student.options());
  // With a teacher in fp64, all numbers are. The student's logits then make room for its gradient.
  const Tensor dlogits = r.dlogits;
  const bool wider = dlogits.defined() && core::compute_type(dlogits) != r.student.scalar_type();
  if (wider) r.dlogits = r.student;
  dispatch_compute(r.student.scalar_type(), [&](auto c) {
    const CpuRows<decltype(c)> rows{r};
    parallel_rows(r.student.size(0), rows.n, [&](int64_t row) { rows.run(row); });
  });
  if (wider) r.dlogits = dlogits.copy_(r.student);
}

}  // namespace liger::ops::fused_linear_divergence
