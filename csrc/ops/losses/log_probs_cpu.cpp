// Log-probabilities on CPU. The formulas are those of liger_ops/kernels/losses/log_probs.py.

#include "ops/losses/log_probs.h"
#include "core/rows/rows_in_order.h"
#include "core/cpu/softmax.h"
#include "core/values.h"

namespace liger::ops::log_probs {
namespace {

template <class C>
struct CpuRows {
  Logits<C> logits;
  const int64_t* index;
  int64_t n, count, ignore_index, first_class;
  C temperature;

  Logits<C> row(int64_t offset) const { return {logits.x + offset, nullptr, 1, logits.cap}; }

  const int64_t* ids(int64_t row) const { return index + row * count; }

  /// The column of an id, or -1 if it is not one of these.
  int64_t column(int64_t id) const {
    const int64_t at = id - first_class;
    return id == ignore_index || at < 0 || at >= n ? -1 : at;
  }

  bool counts(int64_t row) const {
    return std::any_of(ids(row), ids(row) + count, [this](int64_t id) { return id != ignore_index; });
  }
};

template <class C>
struct Stats {
  C peak, total, mean;
};

template <class C>
Stats<C> scan_row(const CpuRows<C>& a, const Logits<C>& x) {
  const C peak = peak_of(x, a.n), inverse = 1 / a.temperature;
  ExpSums sums;
  for_blocks(x, a.n, [&](int64_t, int64_t count, const C* v) {
    vectorized<C>([&] { add_exps(v, nullptr, C(0), count, peak, inverse, sums); });
  });
  return {peak, C(sums.total), C(sums.exponents / sums.total)};
}

/// Of one row with the statistics `of`: (mean of v / temperature, log(sum of p^2), first column with the largest v).
template <class C>
std::tuple<C, C, int64_t> scan_extras(const CpuRows<C>& a, const Logits<C>& x, const Stats<C>& of) {
  double level = 0, squares = 0;
  int64_t first_top = -1;
  for_blocks(x, a.n, [&](int64_t first, int64_t count, const C* v) {
    for (int64_t i = 0; i < count; ++i) {
      level += v[i];
      squares += std::exp(2 * double((v[i] - of.peak) / a.temperature));
      if (first_top < 0 && v[i] == of.peak) first_top = first + i;
    }
  });
  return {C(level / double(a.n) / a.temperature), C(std::log(squares) - 2 * std::log(double(of.total))), first_top};
}

/// out = exp(x) * (constant + linear * x), with x = (v - peak) * inverse
template <class C>
void write_gradient(C* out, const C* v, int64_t n, C peak, C inverse, C constant, C linear) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const C x = exponent((v[i] - peak) * inverse);
    out[i] = vector_exp(x) * (constant + linear * x);
  }
}

template <class C>
void backward_row(
    const CpuRows<C>& a, Output<C> dx, const Logits<C>& x, int64_t row, const Stats<C>& of, const C* grad, C h,
    C of_log_sum_exp, const C* chosen, bool of_others) {
  const int64_t* ids = a.ids(row);
  C pull = of_others ? 1 : -of_log_sum_exp;
  for (int64_t k = 0; grad && k < a.count; ++k) pull += ids[k] == a.ignore_index ? C(0) : grad[k];
  const C inverse = 1 / a.temperature, scale = inverse / of.total;
  const C constant = (h * of.mean - pull) * scale, linear = -h * scale;
  auto write = [&](C* out, const C* v, int64_t n) {
    vectorized<C>([&] { write_gradient(out, v, n, of.peak, inverse, constant, linear); });
  };
  C stage[kStage];
  for_blocks(x, a.n, [&](int64_t first, int64_t count, const C* v) {
    write(stage, v, count);
    x.multiply_by_slopes(stage, first, count);
    vectorized<C>([&] { store_all(dx + first, stage, count); });
  });
  for (int64_t k = 0; (grad || of_others) && k < a.count; ++k) {
    const int64_t column = a.column(ids[k]);
    if (column < 0) continue;
    if (of_others) {
      write_zeros(dx + column, 1);
      continue;
    }
    C own = 0;  // of all equal ids
    for (int64_t j = 0; j < a.count; ++j) own += ids[j] == ids[k] ? grad[j] : C(0);
    const C v = x.capped(chosen[k]);
    C at = 0;
    write(&at, &v, 1);
    at = (at + own * inverse) * (x.cap > 0 ? softcap_slope(chosen[k], x.cap) : 1);
    store_all(dx + column, &at, 1);
  }
}

/// Calls f(rows) with all fields set.
template <class F>
void with_rows(
    const char* op, const Tensor& logits, const Tensor& given_index, const Options& o, const Columns& columns,
    const F& f) {
  const Tensor index = class_indices(given_index);
  const int64_t n = logits.size(-1), classes = columns.classes_of(logits), *ids = index.const_data_ptr<int64_t>();
  check_classes(op, ids, index.numel(), classes, o, columns.ids);
  dispatch_compute(logits.scalar_type(), [&](auto c) {
    using C = decltype(c);
    f(CpuRows<C>{
        {input<C>(logits), nullptr, 1, C(o.softcap.value_or(0))},
        ids,
        n,
        ids_per_row(logits, index),
        o.ignore_index,
        columns.first,
        C(o.temperature)});
  });
}

}  // namespace

void forward_cpu(const char* op, Tensor logits, Tensor index, const Options& o, Results& out, const Columns& columns) {
  runtime::count_cpu_call();
  const int64_t rows = c10::multiply_integers(logits.sizes().slice(0, logits.dim() - 1));
  const auto walk = rows_in_order<1>(op, "logits", {&logits});
  with_rows(op, logits, index, o, columns, [&]<class C>(const CpuRows<C>& a) {
    C *log_probs = data_or_null<C>(out.log_probs), *h = data_or_null<C>(out.entropy);
    C *stats = data_or_null<C>(out.stats), *chosen = data_or_null<C>(out.chosen);
    C *mean_logits = data_or_null<C>(out.mean_logits), *log_squares = data_or_null<C>(out.log_sum_sq_probs);
    bool* is_top1 = data_or_null<bool>(out.is_top1);
    const bool extras = out.has_extras();
    parallel_rows(rows, a.n, [&](int64_t row) {
      const Logits<C> x = a.row(walk.offset(0, row));
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
        const C raw = column >= 0 ? first_number(x.x + column) : C(0);
        log_probs[at] = counted ? (x.capped(raw) - of.peak) / a.temperature - log_total : C(0);
        if (chosen) chosen[at] = raw;
        if (is_top1) is_top1[at] = column >= 0 && column == top;
      }
    });
  });
}

void backward_cpu(
    const char* op, Tensor& dlogits, const ResultGradients& upstream, Tensor logits, Tensor index, const Tensor& stats,
    const Tensor& chosen, const Options& o, const Columns& columns) {
  runtime::count_cpu_call();
  if (logits.numel() == 0) return;
  Tensor out = dlogits;
  const auto walk = rows_in_order<2>(op, "logits", {&out, &logits});
  with_rows(op, logits, index, o, columns, [&]<class C>(const CpuRows<C>& a) {
    const C *grad = const_data_or_null<C>(upstream.log_probs), *h = const_data_or_null<C>(upstream.entropy);
    const C* of_log_sum_exp = const_data_or_null<C>(upstream.log_sum_exp);
    const C *saved = const_data_or_null<C>(stats), *picked = const_data_or_null<C>(chosen);
    const auto to = output<C>(out);
    parallel_rows(walk.rows, a.n, [&](int64_t row) {
      const auto dx = to + walk.offset(0, row);
      if (!a.counts(row)) return write_zeros(dx, a.n);
      const Stats<C> of{saved[3 * row], saved[3 * row + 1], saved[3 * row + 2]};
      backward_row(
          a, dx, a.row(walk.offset(1, row)), row, of, grad ? grad + row * a.count : nullptr, h ? h[row] : C(0),
          of_log_sum_exp ? of_log_sum_exp[row] : C(0), picked + row * a.count, upstream.of_others);
    });
  });
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

}  // namespace liger::ops::log_probs
