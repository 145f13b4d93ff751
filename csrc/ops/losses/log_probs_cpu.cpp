// Log-probabilities on CPU. The formulas are those of liger_ops/kernels/losses/log_probs.py.

#include "core/cpu.h"
#include "core/cpu_math.h"
#include "ops/losses/log_probs.h"
#include "ops/losses/rows_in_order.h"

namespace liger::ops::log_probs {
namespace {

constexpr int64_t kStage = 512;

template <class T>
struct CpuRows {
  using C = Compute<T>;
  const T* logits;
  const int64_t* index;
  int64_t n, count, ignore_index, first_class;
  C temperature, cap;  // cap: 0 without a softcap

  const int64_t* ids(int64_t row) const { return index + row * count; }

  /// The column of an id, or -1 if it is not one of these.
  int64_t column(int64_t id) const {
    const int64_t at = id - first_class;
    return id == ignore_index || at < 0 || at >= n ? -1 : at;
  }

  bool counts(int64_t row) const {
    return std::any_of(ids(row), ids(row) + count, [this](int64_t id) { return id != ignore_index; });
  }

  /// Not inlined, because contracting it with a subtraction of the peak would leave a rounding error where both are equal.
  C10_NOINLINE C capped(C x) const { return cap > 0 ? cap * std::tanh(x / cap) : x; }

  /// The softcap's derivative, without the cancellation of 1 - tanh^2.
  C slope(C x) const {
    if (!(cap > 0)) return 1;
    const C e = std::exp(-2 * std::fabs(x / cap));
    return 4 * e / ((1 + e) * (1 + e));
  }

  /// `count` logits from x on, capped.
  const C* load(const T* x, C* stage, int64_t columns) const {
    const C* v = widen_all(x, stage, columns);
    if (!(cap > 0)) return v;
    for (int64_t i = 0; i < columns; ++i) stage[i] = capped(v[i]);
    return stage;
  }
};

template <class C>
struct Stats {
  C peak, total, mean;
};

template <class C>
LIGER_VECTORIZED C largest(const C* v, int64_t n, C start) {
  C out = start;
#pragma omp simd reduction(max : out)
  for (int64_t i = 0; i < n; ++i) out = v[i] > out ? v[i] : out;
  return out;
}

/// Adds exp(away) and exp(away) * away to the sums.
template <class C>
LIGER_VECTORIZED void add_powers(const C* v, int64_t n, C peak, C inverse, double& total, double& spread) {
  C sum = 0, weighed = 0;
#pragma omp simd reduction(+ : sum, weighed)
  for (int64_t i = 0; i < n; ++i) {
    const C distance = (v[i] - peak) * inverse;
    // exp of this is 0; the limit avoids 0 * -inf.
    const C away = distance < -1000 ? C(-1000) : distance;
    const C e = vector_exp(away);
    sum += e;
    weighed += e * away;
  }
  total += sum;
  spread += weighed;
}

template <class T>
Stats<Compute<T>> scan_row(const CpuRows<T>& a, const T* x) {
  using C = Compute<T>;
  C stage[kStage], peak = std::numeric_limits<C>::lowest();
  for (int64_t first = 0; first < a.n; first += kStage) {
    const int64_t count = std::min(kStage, a.n - first);
    peak = largest(a.load(x + first, stage, count), count, peak);
  }
  double total = 0, spread = 0;
  for (int64_t first = 0; first < a.n; first += kStage) {
    const int64_t count = std::min(kStage, a.n - first);
    add_powers(a.load(x + first, stage, count), count, peak, 1 / a.temperature, total, spread);
  }
  return {peak, C(total), C(spread / total)};
}

/// Of one row with the statistics `of`: (mean of v / temperature, log(sum of p^2), first column with the largest v).
template <class T>
std::tuple<Compute<T>, Compute<T>, int64_t> scan_extras(const CpuRows<T>& a, const T* x, const Stats<Compute<T>>& of) {
  using C = Compute<T>;
  C stage[kStage];
  double level = 0, squares = 0;
  int64_t first_top = -1;
  for (int64_t first = 0; first < a.n; first += kStage) {
    const int64_t count = std::min(kStage, a.n - first);
    const C* v = a.load(x + first, stage, count);
    for (int64_t i = 0; i < count; ++i) {
      level += v[i];
      squares += std::exp(2 * double((v[i] - of.peak) / a.temperature));
      if (first_top < 0 && v[i] == of.peak) first_top = first + i;
    }
  }
  return {C(level / double(a.n) / a.temperature), C(std::log(squares) - 2 * std::log(double(of.total))), first_top};
}

/// out = exp(away) * (level + tilt * away)
template <class C>
LIGER_VECTORIZED void write_gradient(C* out, const C* v, int64_t n, C peak, C inverse, C level, C tilt) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const C distance = (v[i] - peak) * inverse;
    const C away = distance < -1000 ? C(-1000) : distance;
    out[i] = vector_exp(away) * (level + tilt * away);
  }
}

template <class T>
void backward_row(
    const CpuRows<T>& a, T* dx, const T* x, int64_t row, const Stats<Compute<T>>& of, const Compute<T>* grad,
    Compute<T> h, const Compute<T>* chosen, bool of_others) {
  using C = Compute<T>;
  const int64_t* ids = a.ids(row);
  C pull = of_others ? 1 : 0;
  for (int64_t k = 0; grad && k < a.count; ++k) pull += ids[k] == a.ignore_index ? C(0) : grad[k];
  const C inverse = 1 / a.temperature, scale = inverse / of.total;
  const C level = (h * of.mean - pull) * scale, tilt = -h * scale;
  C stages[2][kStage];
  for (int64_t first = 0; first < a.n; first += kStage) {
    const int64_t count = std::min(kStage, a.n - first);
    const C* v = a.load(x + first, stages[0], count);
    write_gradient(stages[1], v, count, of.peak, inverse, level, tilt);
    for (int64_t i = 0; a.cap > 0 && i < count; ++i) stages[1][i] *= a.slope(C(x[first + i]));
    for (int64_t i = 0; i < count; ++i) dx[first + i] = narrow<T>(stages[1][i]);
  }
  for (int64_t k = 0; (grad || of_others) && k < a.count; ++k) {
    const int64_t column = a.column(ids[k]);
    if (column < 0) continue;
    if (of_others) {
      dx[column] = T(0);
      continue;
    }
    C own = 0;  // of all equal ids
    for (int64_t j = 0; j < a.count; ++j) own += ids[j] == ids[k] ? grad[j] : C(0);
    const C v = a.capped(chosen[k]);
    C at = 0;
    write_gradient(&at, &v, 1, of.peak, inverse, level, tilt);
    dx[column] = narrow<T>((at + own * inverse) * a.slope(chosen[k]));
  }
}

/// Calls f(rows) with all fields set.
template <class F>
void with_rows(
    const char* op, const Tensor& logits, const Tensor& given_index, const Options& o, const Columns& columns,
    const F& f) {
  const Tensor index = (given_index.scalar_type() == at::kLong ? given_index : given_index.to(at::kLong)).contiguous();
  const int64_t n = logits.size(-1), classes = columns.classes_of(logits), *ids = index.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < index.numel(); ++i) {
    LIGER_CHECK(
        ids[i] == o.ignore_index || (ids[i] >= 0 && ids[i] < classes), op, columns.ids,
        c10::str("lie in [0, ", classes, ") or be ignore_index, ", o.ignore_index), ids[i]);
  }
  dispatch_activation_parameter(logits.scalar_type(), logits.scalar_type(), [&](auto type, auto) {
    using T = decltype(type);
    using C = Compute<T>;
    f(CpuRows<T>{
        logits.const_data_ptr<T>(), ids, n, ids_per_row(logits, index), o.ignore_index, columns.first, C(o.temperature),
        C(o.softcap.value_or(0))});
  });
}

template <class C>
C* data_of(const Tensor& t) {
  return t.defined() && t.numel() > 0 ? t.data_ptr<C>() : nullptr;
}

}  // namespace

void forward_cpu(const char* op, Tensor logits, Tensor index, const Options& o, Results& out, const Columns& columns) {
  runtime::count_cpu_call();
  const int64_t rows = c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1));
  const auto walk = rows_in_order<1>(op, "logits", {&logits});
  with_rows(op, logits, index, o, columns, [&](const auto& a) {
    using C = typename std::decay_t<decltype(a)>::C;
    C *log_probs = data_of<C>(out.log_probs), *h = data_of<C>(out.entropy);
    C *stats = data_of<C>(out.stats), *chosen = data_of<C>(out.chosen);
    C *mean_logits = data_of<C>(out.mean_logits), *log_squares = data_of<C>(out.log_sum_sq_probs);
    bool* is_top1 = data_of<bool>(out.is_top1);
    const bool extras = out.has_extras();
    parallel_ranges(rows, cpu_ranges(rows, a.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const auto* x = a.logits + walk.strides[0].offset(row, walk.inner_rows);
        const bool counts = a.counts(row);
        const Stats<C> of = counts ? scan_row(a, x) : Stats<C>{};
        const C log_total = counts ? std::log(of.total) : C(0);
        const auto [level, squares, top] =
            extras && counts ? scan_extras(a, x, of) : std::make_tuple(C(0), C(0), int64_t(-1));
        if (mean_logits) mean_logits[row] = level;
        if (log_squares) log_squares[row] = squares;
        if (h) h[row] = log_total - of.mean;
        if (stats) stats[3 * row] = of.peak, stats[3 * row + 1] = of.total, stats[3 * row + 2] = of.mean;
        for (int64_t k = 0; k < a.count; ++k) {
          const int64_t id = a.ids(row)[k], at = row * a.count + k;
          const int64_t column = a.column(id);
          const bool counted = id != a.ignore_index;
          const C raw = column >= 0 ? C(x[column]) : C(0);
          log_probs[at] = counted ? (a.capped(raw) - of.peak) / a.temperature - log_total : C(0);
          if (chosen) chosen[at] = raw;
          if (is_top1) is_top1[at] = column >= 0 && column == top;
        }
      }
    });
  });
}

void backward_cpu(
    const char* op, Tensor& dlogits, const Upstream& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o, const Columns& columns) {
  runtime::count_cpu_call();
  if (logits.numel() == 0) return;
  Tensor out = dlogits;
  const auto walk = rows_in_order<2>(op, "logits", {&out, &logits});
  with_rows(op, logits, index, o, columns, [&](const auto& a) {
    using C = typename std::decay_t<decltype(a)>::C;
    using T = std::remove_const_t<std::remove_pointer_t<decltype(a.logits)>>;
    const C *grad = data_of<C>(upstream.log_probs), *h = data_of<C>(upstream.entropy);
    const C *saved = data_of<C>(stats), *picked = data_of<C>(chosen);
    T* to = out.template data_ptr<T>();
    parallel_ranges(walk.rows, cpu_ranges(walk.rows, a.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* dx = to + walk.strides[0].offset(row, walk.inner_rows);
        if (!a.counts(row)) {
          std::fill_n(dx, a.n, T(0));
          continue;
        }
        const T* x = a.logits + walk.strides[1].offset(row, walk.inner_rows);
        const Stats<C> of{saved[3 * row], saved[3 * row + 1], saved[3 * row + 2]};
        backward_row(
            a, dx, x, row, of, grad ? grad + row * a.count : nullptr, h ? h[row] : C(0), picked + row * a.count,
            upstream.of_others);
      }
    });
  });
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

}  // namespace liger::ops::log_probs
