#pragma once

// Cross entropy of rows of logits on CPU and CUDA, below dispatch and autograd: what the ops that compute it share.
//
// logits: (..., V) of any strides, target: (...) int64 or int32, weight: (V,), all as check() admits them. Losses and
// statistics are fp32 (fp64 for fp64 logits). A mean divides by the sum of the targets' weights; its z-loss, which has
// no weight, by the number of targets. Both stay on the device.

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <numeric>

#include "core/checks.h"
#include "core/cpu.h"
#include "core/cpu_math.h"
#include "core/cuda.h"
#include "core/half.h"
#include "core/rows.h"
#include "kernels/cross_entropy.h"

namespace liger::core::cross_entropy {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Mirrors the constants of liger_ops/kernels/cross_entropy.py.
enum Flags : int32_t {
  kHasWeight = 1,
  kHasSmoothing = 2,
  kHasSoftcap = 4,
  kSaveStats = 8,
  kSaveZLoss = 16,
  kSaveMetrics = 32,
  kAddZLoss = 64,
  kMean = 128,
  kFromPartial = 256,
  kToPartial = 512,
  kSaveTotals = 1024,
  kHasGrad = 2048,
  kCountOnly = 4096,
  kHasTotals = 8192,
};

enum class Reduction { None, Mean, Sum };

/// What follows the tensors in every schema.
struct Options {
  Reduction reduction;
  int64_t ignore_index;
  double label_smoothing, lse_square_scale;
  std::optional<double> softcap;

  auto tie() { return std::tie(reduction, ignore_index, label_smoothing, lse_square_scale, softcap); }
  bool mean() const { return reduction == Reduction::Mean; }
  bool reduced() const { return reduction != Reduction::None; }
  const char* reduction_name() const { return mean() ? "mean" : reduced() ? "sum" : "none"; }
  int32_t flags(const Tensor& weight) const {
    return (weight.defined() ? kHasWeight : 0) | (label_smoothing > 0 ? kHasSmoothing : 0) |
        (softcap ? kHasSoftcap : 0) | (mean() ? kMean : 0);
  }
};

/// Undefined: not asked for. stats: (3, rows), totals: (2,), see the kernels.
struct Results {
  Tensor loss, z_loss, accuracy, predicted, stats, totals;
};

struct Wanted {
  bool metrics = false, stats = false;
};

inline Options parse(
    const char* op, c10::string_view reduction, int64_t ignore_index, double label_smoothing, double lse_square_scale,
    std::optional<double> softcap) {
  LIGER_CHECK(
      reduction == "mean" || reduction == "sum" || reduction == "none", op, "reduction", "be 'mean', 'sum' or 'none'",
      "'", reduction, "'");
  LIGER_CHECK(
      label_smoothing >= 0 && label_smoothing <= 1, op, "label_smoothing", "be between 0 and 1", label_smoothing);
  LIGER_CHECK(std::isfinite(lse_square_scale), op, "lse_square_scale", "be finite", lse_square_scale);
  LIGER_CHECK(!softcap || (*softcap > 0 && std::isfinite(*softcap)), op, "softcap", "be positive and finite", *softcap);
  auto kind = reduction == "mean" ? Reduction::Mean : reduction == "sum" ? Reduction::Sum : Reduction::None;
  return {kind, ignore_index, label_smoothing, lse_square_scale, softcap};
}

template <class... O>
Options check(
    const char* op, const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const O&... options) {
  check_activation(op, "logits", logits);
  check_dense(op, "target", target);
  check_same_device(op, "target", target, "logits", logits);
  LIGER_CHECK(
      target.scalar_type() == at::kLong || target.scalar_type() == at::kInt, op, "target",
      "be int64 or int32 class indices", target.scalar_type());
  auto row_sizes = logits.sym_sizes().slice(0, logits.dim() - 1);
  LIGER_CHECK(
      target.sym_sizes().equals(row_sizes), op, "target",
      c10::str("have shape ", row_sizes, ", that of logits without its last dimension"), target.sym_sizes());
  if (weight && weight->defined()) {
    auto dtype = weight->scalar_type(), like = logits.scalar_type();
    check_dense(op, "weight", *weight);
    check_same_device(op, "weight", *weight, "logits", logits);
    LIGER_CHECK(
        dtype == like || (dtype == at::kFloat && like != at::kDouble), op, "weight",
        c10::str("be float32 or have the dtype of logits, ", like), dtype);
    LIGER_CHECK(
        weight->dim() == 1 && weight->sym_size(0) == logits.sym_sizes().back(), op, "weight",
        c10::str("have shape [", logits.sym_sizes().back(), "], one value a class"), weight->sym_sizes());
  }
  return parse(op, options...);
}

inline void check_no_overlap(const char* op, const Tensor& logits) {
  LIGER_CHECK(
      at::has_internal_overlap(logits) != at::MemOverlap::Yes, op, "logits", "not overlap themselves", "strides ",
      logits.strides());
}

/// Rows in logical order, as targets are numbered. A tensor that two levels of strides cannot describe gives way to a
/// copy.
template <size_t N>
Rows<N> walk_logical(const char* op, int64_t rows, const std::array<Tensor*, N>& tensors) {
  Rows<N> out;
  bool unit = true;
  for (Tensor* t : tensors) unit = unit && (t->stride(-1) == 1 || t->size(-1) == 1);
  if (!unit || !detail::merge_levels<N>(tensors, out)) {
    for (Tensor* t : tensors) *t = t->contiguous();
    detail::merge_levels<N>(tensors, out);
  }
  out.rows = rows;
  out.n = tensors[0]->size(-1);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      out.rows <= kMost && out.n <= kMost, op, "logits", "have fewer than 2^31 rows and classes", out.rows, " rows of ",
      out.n);
  return out;
}

/// What arrives for the loss of each row: one number a row, or one for all (stride 0).
struct Upstream {
  Tensor values;
  int64_t stride = 0;

  /// One number a row, contiguous and in compute type; undefined: 1 for every row.
  explicit Upstream(const Tensor& rows) : values(rows), stride(1) {}
  Upstream(const char* op, const Tensor& grad, const Tensor& logits, bool reduced) {
    auto expected = reduced ? at::IntArrayRef() : logits.sizes().slice(0, logits.dim() - 1);
    LIGER_CHECK(grad.sizes().equals(expected), op, "the gradient", c10::str("have shape ", expected), grad.sizes());
    check_same_device(op, "the gradient", grad, "logits", logits);
    values = grad.to(compute_type(logits));
    auto strides = values.strides();
    bool expanded = std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride == 0; });
    if (!expanded) values = values.contiguous();
    stride = expanded ? 0 : 1;
  }
};

inline Results empty_results(const Tensor& logits, const Tensor& target, const Options& o, Wanted wanted) {
  auto options = logits.options().dtype(compute_type(logits));
  auto sizes = o.reduced() ? c10::SymIntArrayRef() : target.sym_sizes();
  Results out;
  out.loss = at::empty_symint(sizes, options);
  if (wanted.metrics) {
    out.z_loss = at::empty_symint(sizes, options);
    out.accuracy = at::empty_symint(sizes, options);
    out.predicted = at::empty_symint(target.sym_sizes(), logits.options().dtype(at::kLong));
  }
  if (wanted.stats) out.stats = at::empty_symint({3, target.sym_numel()}, options);
  if (wanted.stats && o.mean()) out.totals = at::empty_symint({2}, options);
  return out;
}

/// Where the results of rows go; null: not asked for.
struct RowsOut {
  char *loss = nullptr, *z_loss = nullptr, *accuracy = nullptr, *stats = nullptr;
  int64_t* predicted = nullptr;

  /// Where those of the rows from `row` on go, which keep statistics of their own.
  RowsOut from(int64_t row, size_t element) const {
    auto move = [&](char* at, int64_t elements) { return at ? at + elements * int64_t(element) : nullptr; };
    return {
        move(loss, row), move(z_loss, row), move(accuracy, row), move(stats, 3 * row),
        predicted ? predicted + row : nullptr};
  }
};

/// Straight into the results if those are not reduced, else into memory of their own: losses, z-losses, accuracies.
struct RowBuffers {
  Tensor scratch;
  RowsOut out;

  RowBuffers(const Results& results, int64_t rows, const Options& o, Wanted wanted) {
    auto at = [](const Tensor& t) { return t.defined() ? static_cast<char*>(t.mutable_data_ptr()) : nullptr; };
    out = {at(results.loss), at(results.z_loss), at(results.accuracy), at(results.stats)};
    out.predicted = reinterpret_cast<int64_t*>(at(results.predicted));
    if (!o.reduced()) return;
    const bool z_rows = wanted.metrics || o.lse_square_scale != 0;
    scratch = at::empty({1 + z_rows + wanted.metrics, rows}, results.loss.options());
    const int64_t bytes = rows * int64_t(scratch.element_size());
    out.loss = at(scratch);
    out.z_loss = z_rows ? out.loss + bytes : nullptr;
    out.accuracy = wanted.metrics ? out.loss + 2 * bytes : nullptr;
  }
};

// ---- CPU

template <class C>
struct Capped {
  C value, slope;
};

inline Capped<float> softcapped(float x, float cap) {
  const float z = x / cap, size = std::fabs(z), q = z * z;
  // tanh(z) = z + z * bend, interpolated in z^2 at the Chebyshev nodes of |z| <= 0.6: within 1.1e-8.
  float bend = -0.0062691197f;
  bend = bend * q + 0.021110959f;
  bend = bend * q - 0.053873949f;
  bend = bend * q + 0.13332915f;
  bend = (bend * q - 0.33333330f) * q;
  const float near = z + z * bend;
  // tanh(|z|) = 1 - 2 u
  const float e = vector_exp(-2 * size), u = e / (1 + e), far = cap - 2 * cap * u;
  const bool small = size < 0.6f;
  return {small ? x + x * bend : z < 0 ? -far : far, small ? 1 - near * near : 4 * u * (1 - u)};
}

inline Capped<double> softcapped(double x, double cap) {
  const double e = std::exp(-2 * std::fabs(x / cap));
  return {cap * std::tanh(x / cap), 4 * e / ((1 + e) * (1 + e))};
}

template <bool kCap, class C>
C capped(C x, C cap) {
  if constexpr (kCap) return softcapped(x, cap).value;
  return x;
}

template <class T>
LIGER_VECTORIZED Compute<T> largest(const T* x, int64_t n, Compute<T> start) {
  using C = Compute<T>;
  C out = start;
#pragma omp simd reduction(max : out)
  for (int64_t i = 0; i < n; ++i) out = widen(x[i]) > out ? widen(x[i]) : out;
  return out;
}

/// f(0) + ... + f(n - 1), in lanes that are few additions deep: a large term does not cost the small ones their digits.
template <class C, class F>
C sum_in_lanes(int64_t n, const F& f) {
  constexpr int64_t kLanes = 64, kBlock = 64 * kLanes;
  double sum = 0;
  for (int64_t block = 0; block < n; block += kBlock) {
    C lanes[kLanes] = {};
    double wide[kLanes];
    const int64_t end = std::min(n, block + kBlock);
    int64_t i = block;
    for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] += f(i + k);
    }
#pragma omp simd
    for (int64_t k = 0; k < end - i; ++k) lanes[k] += f(i + k);
#pragma omp simd
    for (int64_t k = 0; k < kLanes; ++k) wide[k] = lanes[k];
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) wide[k] += wide[k + width];
    }
    sum += wide[0];
  }
  return C(sum);
}

template <bool kCap, class T>
LIGER_VECTORIZED Compute<T> sum_exp(const T* x, int64_t n, Compute<T> base, Compute<T> cap) {
  using C = Compute<T>;
  return sum_in_lanes<C>(n, [=](int64_t i) { return vector_exp(capped<kCap>(widen(x[i]), cap) - base); });
}

template <bool kCap, class T>
LIGER_VECTORIZED Compute<T> sum_away(
    const T* x, const Compute<T>* weight, int64_t n, Compute<T> reference, Compute<T> cap) {
  using C = Compute<T>;
  auto away = [=](int64_t i) { return capped<kCap>(widen(x[i]), cap) - reference; };
  if (weight) return sum_in_lanes<C>(n, [=](int64_t i) { return weight[i] * away(i); });
  return sum_in_lanes<C>(n, away);
}

template <bool kCap, class T>
LIGER_VECTORIZED void gradient(
    T* out, const T* x, const Compute<T>* weight, int64_t n, Compute<T> top, Compute<T> slope, Compute<T> tilt,
    Compute<T> cap) {
  using C = Compute<T>;
  if constexpr (kCap) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const auto v = softcapped(widen(x[i]), cap);
      const C w = weight ? weight[i] : C(1);
      out[i] = narrow<T>((vector_exp(v.value - top) * slope - tilt * w) * v.slope);
    }
  } else if (weight) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      out[i] = narrow<T>(vector_exp(widen(x[i]) - top) * slope - tilt * weight[i]);
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = narrow<T>(vector_exp(widen(x[i]) - top) * slope - tilt);
  }
}

template <class T>
struct CpuRows {
  using C = Compute<T>;
  const T* logits;
  const int64_t* target;
  const C* weight;
  int64_t rows, n;
  C weight_sum, cap;
  Options options;
  C *loss, *z_loss, *accuracy, *stats;
  int64_t* predicted;

  C weight_of(int64_t y) const { return weight ? weight[y] : C(1); }
};

// The true class stays out of the sums and joins last: 1 - p_y and small losses keep all their digits.
template <bool kCap, class T>
void forward_row(const CpuRows<T>& a, const T* x, int64_t row) {
  using C = Compute<T>;
  const int64_t y = a.target[row], after = a.n - y - 1;
  const auto& o = a.options;
  if (y == o.ignore_index) {
    a.loss[row] = 0;
    if (a.z_loss) a.z_loss[row] = 0;
    if (a.predicted) a.accuracy[row] = 0, a.predicted[row] = -1;
    return;
  }
  const C raw = largest(x + y + 1, after, largest(x, y, std::numeric_limits<C>::lowest()));
  const C own = capped<kCap>(C(x[y]), a.cap), peak = capped<kCap>(raw, a.cap), top = own > peak ? own : peak;
  const C others = sum_exp<kCap>(x, y, top, a.cap) + sum_exp<kCap>(x + y + 1, after, top, a.cap);
  const C total = std::exp(own - top) + others;
  const C nll = top - own + (own >= peak ? std::log1p(others) : std::log(total));
  const C lse = top + std::log(total), z_loss = C(o.lse_square_scale) * lse * lse;
  C loss = a.weight_of(y) * nll;
  if (o.label_smoothing > 0) {
    // Distances from x_y rather than from 0: no digits lost to a common offset of the logits.
    const bool bottomless = own == -std::numeric_limits<C>::infinity();
    const C reference = bottomless ? C(0) : own, level = bottomless ? lse : nll;
    C away = sum_away<kCap>(x, a.weight, y, reference, a.cap);
    away += sum_away<kCap>(x + y + 1, a.weight ? a.weight + y + 1 : nullptr, after, reference, a.cap);
    if (bottomless) away += a.weight_of(y) * own;
    loss = (1 - C(o.label_smoothing)) * loss + C(o.label_smoothing) / a.n * (level * a.weight_sum - away);
  }
  a.loss[row] = o.reduced() ? loss : loss + z_loss;
  if (a.z_loss) a.z_loss[row] = z_loss;
  if (a.stats) {
    a.stats[row] = top;
    a.stats[a.rows + row] = total;
    a.stats[2 * a.rows + row] = others / total;
  }
  if (a.predicted) {
    int64_t best = std::find_if(x, x + a.n, [&](T v) { return C(v) >= raw && C(v) >= C(x[y]); }) - x;
    a.predicted[row] = best = best == a.n ? 0 : best;
    a.accuracy[row] = best == y;
  }
}

/// grad: what arrives for this row's loss, grad_z: for its z-loss, which has another divisor in a mean.
template <bool kCap, class T>
void backward_row(const CpuRows<T>& a, T* out, const T* x, int64_t row, Compute<T> grad, Compute<T> grad_z) {
  using C = Compute<T>;
  const int64_t y = a.target[row], n = a.n;
  const auto& o = a.options;
  if (y == o.ignore_index) {
    std::fill(out, out + n, T(0));
    return;
  }
  const C top = a.stats[row], total = a.stats[a.rows + row], miss = a.stats[2 * a.rows + row];
  // d loss / d x_k = p_k * (pull + spill) - tilt * w_k, and for the true class
  //                  p_y * spill - (1 - p_y) * pull - tilt * w_y
  const C smoothing = C(o.label_smoothing), pull = grad * a.weight_of(y) * (1 - smoothing);
  const C tilt = grad * smoothing / n;
  const C z_slope = grad_z * 2 * C(o.lse_square_scale) * (top + std::log(total));
  const C spill = smoothing > 0 ? z_slope + grad * smoothing * (a.weight_sum / n) : z_slope;
  C at_y = std::exp(capped<kCap>(C(x[y]), a.cap) - top) / total * spill - miss * pull - tilt * a.weight_of(y);
  if constexpr (kCap) at_y *= softcapped(C(x[y]), a.cap).slope;
  gradient<kCap>(out, x, a.weight, n, top, (pull + spill) / total, tilt, a.cap);
  out[y] = T(at_y);
}

inline void check_classes(const char* op, const int64_t* y, int64_t rows, int64_t n, const Options& o) {
  for (int64_t row = 0; row < rows; ++row) {
    LIGER_CHECK(
        y[row] == o.ignore_index || (y[row] >= 0 && y[row] < n), op, "target",
        c10::str("lie in [0, ", n, ") or be ignore_index, ", o.ignore_index), y[row]);
  }
}

/// A conversion that changes nothing is a dispatched call all the same, which shows beside a small loss.
inline Tensor class_indices(const Tensor& target) {
  return (target.scalar_type() == at::kLong ? target : target.to(at::kLong)).contiguous();
}

/// Calls f(rows, std::bool_constant<softcap>) with everything but the results filled in.
template <class F>
void with_cpu_rows(
    const char* op, const Tensor& logits, const Tensor& target_in, const Tensor& weight_in, const Options& o,
    const F& f) {
  Tensor target = class_indices(target_in);
  Tensor weight = weight_in.defined() ? weight_in.to(compute_type(logits)).contiguous() : weight_in;
  const int64_t n = logits.size(-1);
  const int64_t* y = target.const_data_ptr<int64_t>();
  check_classes(op, y, target.numel(), n, o);
  dispatch_activation_parameter(logits.scalar_type(), logits.scalar_type(), [&](auto t, auto) {
    using T = decltype(t);
    using C = Compute<T>;
    CpuRows<T> a{};
    a.logits = logits.const_data_ptr<T>();
    a.target = y;
    a.weight = weight.defined() ? weight.const_data_ptr<C>() : nullptr;
    a.rows = target.numel();
    a.n = n;
    a.weight_sum = weight.defined() ? weight.sum().item<C>() : C(n);
    a.cap = C(o.softcap.value_or(1));
    a.options = o;
    if (o.softcap) {
      f(a, std::true_type{});
    } else {
      f(a, std::false_type{});
    }
  });
}

inline void forward_rows_cpu(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Options& o, const RowsOut& out) {
  auto walk = walk_logical<1>(op, target.numel(), {&logits});
  with_cpu_rows(op, logits, target, weight, o, [&](auto& a, auto cap) {
    using C = std::remove_pointer_t<decltype(a.loss)>;
    a.loss = reinterpret_cast<C*>(out.loss);
    a.z_loss = reinterpret_cast<C*>(out.z_loss);
    a.accuracy = reinterpret_cast<C*>(out.accuracy);
    a.stats = reinterpret_cast<C*>(out.stats);
    a.predicted = out.predicted;
    parallel_ranges(a.rows, cpu_ranges(a.rows, a.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        forward_row<decltype(cap)::value>(a, a.logits + walk.strides[0].offset(row, walk.inner_rows), row);
      }
    });
  });
}

/// (sum of w_y, number of targets)
inline std::array<double, 2> count_targets(const Tensor& target_in, const Tensor& weight_in, const Options& o) {
  Tensor target = class_indices(target_in);
  Tensor weight = weight_in.defined() ? weight_in.to(at::kDouble).contiguous() : weight_in;
  const int64_t* y = target.const_data_ptr<int64_t>();
  const double* w = weight.defined() ? weight.const_data_ptr<double>() : nullptr;
  std::array<double, 2> totals{};
  for (int64_t row = 0; row < target.numel(); ++row) {
    if (y[row] == o.ignore_index) continue;
    totals[0] += w ? w[y[row]] : 1;
    totals[1] += 1;
  }
  return totals;
}

template <class C>
void write_scalars(const Tensor& to, std::initializer_list<double> values) {
  if (to.defined()) std::copy(values.begin(), values.end(), to.template data_ptr<C>());
}

/// Losses and metrics of all rows -> the call's results, and `totals` where those are asked for.
inline void sum_rows_cpu(
    const RowBuffers& rows, const std::array<double, 2>& totals, const Options& o, const Results& out) {
  auto sum_into = [&](auto zero) {
    using C = decltype(zero);
    const int64_t count = rows.scratch.size(1);
    auto total = [&](int64_t which) {
      const C* at = rows.scratch.const_data_ptr<C>() + which * count;
      return std::accumulate(at, at + count, 0.0);
    };
    // 0 / 0 without any target: NaN, as in PyTorch.
    const double by_weight = o.mean() ? totals[0] : 1, by_count = o.mean() ? totals[1] : 1;
    const double z_loss = rows.scratch.size(0) > 1 ? total(1) / by_count : 0;
    write_scalars<C>(out.loss, {total(0) / by_weight + z_loss});
    write_scalars<C>(out.totals, {totals[0], totals[1]});
    if (!out.accuracy.defined()) return;
    write_scalars<C>(out.z_loss, {z_loss});
    write_scalars<C>(out.accuracy, {total(2) / by_count});
  };
  out.loss.scalar_type() == at::kDouble ? sum_into(double()) : sum_into(float());
}

inline Results forward_cpu(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Options& o, Wanted wanted) {
  runtime::count_cpu_call();
  Results out = empty_results(logits, target, o, wanted);
  RowBuffers rows(out, target.numel(), o, wanted);
  forward_rows_cpu(op, logits, target, weight, o, rows.out);
  if (o.reduced()) sum_rows_cpu(rows, count_targets(target, weight, o), o, out);
  return out;
}

/// dlogits may be logits. totals: undefined unless the loss is a mean.
inline void backward_rows_cpu(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const char* stats,
    const Tensor& totals, const Upstream& upstream, const Options& o) {
  Tensor out = dlogits;
  auto walk = walk_logical<2>(op, target.numel(), {&out, &logits});
  with_cpu_rows(op, logits, target, weight, o, [&](auto& a, auto cap) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(a.logits)>>;
    using C = Compute<T>;
    T* to = out.template data_ptr<T>();
    // Read alone: the rows' code takes it as it takes what forward writes.
    a.stats = const_cast<C*>(reinterpret_cast<const C*>(stats));
    const C* grads = upstream.values.defined() ? upstream.values.template const_data_ptr<C>() : nullptr;
    const C* divisors = o.mean() ? totals.const_data_ptr<C>() : nullptr;
    parallel_ranges(a.rows, cpu_ranges(a.rows, a.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const C g = grads ? grads[row * upstream.stride] : C(1);
        T* dx = to + walk.strides[0].offset(row, walk.inner_rows);
        const T* x = a.logits + walk.strides[1].offset(row, walk.inner_rows);
        const C by_weight = divisors ? divisors[0] : C(1), by_count = divisors ? divisors[1] : C(1);
        backward_row<decltype(cap)::value>(a, dx, x, row, g / by_weight, g / by_count);
      }
    });
  });
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

/// dlogits may be logits.
inline void backward_cpu(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const Tensor& grad, const Options& o) {
  runtime::count_cpu_call();
  Upstream upstream(op, grad, logits, o.reduced());
  if (logits.numel() == 0) return;
  backward_rows_cpu(
      op, dlogits, logits, target, weight, static_cast<const char*>(stats.const_data_ptr()), totals, upstream, o);
}

inline Results forward_backward_cpu(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o) {
  Results out = forward_cpu(op, logits, target, weight, o, {false, true});
  if (logits.numel() == 0) return out;
  const auto* stats = static_cast<const char*>(out.stats.const_data_ptr());
  backward_rows_cpu(op, logits, logits, target, weight, stats, out.totals, Upstream(Tensor()), o);
  return out;
}

/// log p_y and the entropy of every row with a target, from the statistics of forward.
inline void describe_rows_cpu(
    const char* op, Tensor logits, const Tensor& target, const char* stats, const Options& o, char* log_prob,
    char* entropy) {
  auto walk = walk_logical<1>(op, target.numel(), {&logits});
  with_cpu_rows(op, logits, target, Tensor(), o, [&](auto& a, auto cap) {
    using C = std::remove_pointer_t<decltype(a.loss)>;
    const C* of = reinterpret_cast<const C*>(stats);
    C *p = reinterpret_cast<C*>(log_prob), *h = reinterpret_cast<C*>(entropy);
    parallel_ranges(a.rows, cpu_ranges(a.rows, a.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t y = a.target[row];
        p[row] = h[row] = 0;
        if (y == o.ignore_index) continue;
        const auto* x = a.logits + walk.strides[0].offset(row, walk.inner_rows);
        const C top = of[row], total = of[a.rows + row], miss = of[2 * a.rows + row];
        auto value = [&](int64_t i) { return capped<decltype(cap)::value>(C(x[i]), a.cap); };
        const C spread = sum_in_lanes<C>(a.n, [&](int64_t i) {
          const C away = value(i) - top, e = std::exp(away);
          return e == 0 ? C(0) : e * away;
        });
        p[row] = miss < C(0.5) ? std::log1p(-miss) : value(y) - top - std::log(total);
        h[row] = std::log(total) - spread / total;
      }
    });
  });
}

inline void scale_cpu(const char* op, Tensor& dlogits, const Tensor& grad) {
  runtime::count_cpu_call();
  Upstream upstream(op, grad, dlogits, grad.dim() == 0);
  if (grad.dim() == 0) {
    if (grad.item<double>() != 1) dlogits.mul_(grad);
  } else {
    dlogits.copy_(dlogits.to(grad.scalar_type()).mul_(grad.unsqueeze(-1)));
  }
}

// ---- CUDA

/// What all launches of one call pass alike.
struct CudaCall {
  const char* op;
  at::Device device;
  int64_t n;
  Tensor target, weight, weight_sum;
  int32_t target_words, flags;
  bool extras;

  CudaCall(const char* name, int64_t classes, const Tensor& target_in, const Tensor& weight_in, const Options& o)
      : op(name), device(target_in.device()), n(classes), target(target_in.contiguous()) {
    if (weight_in.defined()) weight = weight_in.to(at::kFloat).contiguous();
    if (weight.defined() && o.label_smoothing > 0) weight_sum = weight.sum();
    target_words = target.scalar_type() == at::kLong ? 2 : 1;
    flags = o.flags(weight);
    extras = flags & (kHasWeight | kHasSmoothing | kHasSoftcap);
  }

  int64_t rows_of(const Tensor& logits) const { return n > 0 ? logits.numel() / n : target.numel(); }

  const void* target_at(int64_t row) const {
    return static_cast<const char*>(address(target)) + row * int64_t(target.element_size());
  }

  int32_t flags_for(const RowsOut& out, const Options& o) const {
    return flags | (out.stats ? kSaveStats : 0) | (out.z_loss ? kSaveZLoss : 0) | (out.predicted ? kSaveMetrics : 0) |
        (o.reduced() ? 0 : kAddZLoss);
  }
};

template <class Config>
runtime::Grid span_grid(const Config& config, int64_t rows, int64_t columns) {
  int64_t span = int64_t(config.BLOCK_N) * config.BLOCKS;
  return {uint32_t(rows * ((columns + span - 1) / span))};
}

/// Losses and metrics of all rows -> the call's results; without losses: the totals of a mean alone. known: these, from
/// before.
inline void sum_rows_cuda(
    const CudaCall& call, const Options& o, const RowsOut& rows_of, const Results& out, const Tensor& known = {}) {
  using K = kernels::cross_entropy_sum;
  const int64_t rows = call.target.numel();
  const auto point = runtime::point_of<K>(call.target_words - 1);
  auto config_for = [&](int64_t count) -> const K::Config& {
    return runtime::first_fit<K>(call.n, false, point, count);
  };
  const int64_t block = config_for(rows).BLOCK, blocks = (rows + block - 1) / block;
  // One program reads a few blocks faster than a second launch starts.
  const int64_t shares = blocks <= 8 ? 1 : std::min<int64_t>(1024, blocks);
  auto floats = call.target.options().dtype(at::kFloat);
  Tensor partial = shares > 1 ? at::empty({shares, 5}, floats) : Tensor();
  const bool counts = !known.defined() && (o.mean() || out.totals.defined());
  int32_t flags = (call.flags & (kHasWeight | kMean)) | (rows_of.z_loss ? kSaveZLoss : 0) |
      (out.accuracy.defined() ? kSaveZLoss | kSaveMetrics : 0) | (out.loss.defined() ? 0 : kCountOnly) |
      (!counts                    ? kHasTotals
           : out.totals.defined() ? kSaveTotals
                                  : 0);
  K::Args args{address(out.loss),     address(out.z_loss),
               address(out.accuracy), address(known.defined() ? known : out.totals),
               address(partial),      rows_of.loss,
               rows_of.z_loss,        rows_of.accuracy,
               address(call.target),  address(call.weight),
               int32_t(rows),         int32_t(call.n),
               o.ignore_index,        flags};
  auto launch_on = [&](int64_t rows_read, int64_t programs, int32_t more) {
    args.rows = int32_t(rows_read);
    args.flags = flags | more;
    auto variant = runtime::variant_index<K>(config_for(rows_read), point);
    launch<K>(call.op, call.device, variant, {uint32_t(programs)}, args);
  };
  if (shares > 1) {
    launch_on(rows, shares, kToPartial);
    launch_on(shares, 1, kFromPartial);
  } else {
    launch_on(rows, 1, 0);
  }
}

// MOST_PARTS, MOST_SKEW and columns_end of the kernels.

/// Programs that one row may be shared out among.
constexpr int64_t kMostParts = 128;
constexpr int64_t kMostSkew = 63;

/// Where rows of n columns end at the latest, whatever their skew.
template <class Config>
int64_t columns_end(const Config& config, int64_t n) {
  return n + (config.SKEWED ? kMostSkew : 0);
}

/// The rows of `logits` are those of the call from `first` on; likewise below.
inline void forward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor logits, int64_t first, const RowsOut& out) {
  using K = kernels::cross_entropy_fwd;
  auto walk = walk_logical<1>(call.op, call.rows_of(logits), {&logits});
  bool aligned = walk.aligned_strides() && aligned16(address(logits), address(call.weight));
  // Shared or not, rows of one dtype have one config.
  auto point_of = [&](int form) { return runtime::point_of<K>(K::dtype(dtype_of(logits)), form); };
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point_of(call.extras ? 2 : 0));
  const auto& from = walk.strides[0];
  // Rows that leave multiprocessors idle are shared out; with extras, for which no such variants are compiled, they are
  // not. A step: what a program reads at a time, of 16-bit logits; with fewer than two it would sooner be done than have
  // met the others.
  const int64_t step = int64_t(config.LANES) * config.TILES * 8, columns = columns_end(config, walk.n);
  const int64_t processors = call.extras ? 0 : runtime::multiprocessors(call.device.index());
  const int64_t wanted =
      std::min({2 * processors / std::max<int64_t>(walk.rows, 1), columns / step, kMostParts, processors});
  const int64_t part = wanted < 2 ? 0 : ((columns + wanted - 1) / wanted + step - 1) / step * step;
  const int64_t parts = part ? (columns + part - 1) / part : 1;
  Tensor shares, arrived;
  if (parts > 1) {
    shares = at::empty({walk.rows, parts, 4}, call.target.options().dtype(at::kFloat));
    arrived = at::zeros({walk.rows}, call.target.options().dtype(at::kInt));
  }
  K::Args args{
      out.loss,
      out.z_loss,
      out.accuracy,
      out.predicted,
      out.stats,
      address(logits),
      call.target_at(first),
      address(call.weight),
      address(call.weight_sum),
      address(shares),
      address(arrived),
      int32_t(walk.rows),
      int32_t(walk.n),
      int32_t(part),
      walk.kernel_inner_rows(),
      from.outer,
      from.inner,
      call.target_words,
      o.ignore_index,
      float(o.label_smoothing),
      float(o.lse_square_scale),
      float(o.softcap.value_or(1)),
      call.flags_for(out, o)};
  const auto point = point_of(call.extras ? 2 : parts > 1);
  launch<K>(call.op, call.device, runtime::variant_index<K>(config, point), {uint32_t(walk.rows * parts)}, args);
}

/// dlogits may be logits. totals: undefined unless the loss is a mean.
inline void backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& dlogits, Tensor logits, int64_t first, const void* stats,
    const Tensor& totals, const Upstream& upstream) {
  using K = kernels::cross_entropy_bwd;
  Tensor out = dlogits;
  auto walk = walk_logical<2>(call.op, call.rows_of(logits), {&out, &logits});
  bool aligned = walk.aligned_strides() && aligned16(address(out), address(logits), address(call.weight));
  const auto& config = runtime::first_fit<K>(walk.n, aligned);
  const auto& [to, from] = walk.strides;
  K::Args args{
      address(out),
      address(logits),
      call.target_at(first),
      stats,
      address(upstream.values),
      address(totals),
      address(call.weight),
      address(call.weight_sum),
      int32_t(walk.rows),
      int32_t(walk.n),
      walk.kernel_inner_rows(),
      to.outer,
      to.inner,
      from.outer,
      from.inner,
      call.target_words,
      upstream.stride,
      o.ignore_index,
      float(o.label_smoothing),
      float(o.lse_square_scale),
      float(o.softcap.value_or(1)),
      call.flags};
  auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(logits)), call.extras));
  launch<K>(call.op, call.device, variant, span_grid(config, walk.rows, columns_end(config, walk.n)), args);
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

/// Leaves the gradient in the logits.
inline void forward_backward_rows_cuda(
    const CudaCall& call, const Options& o, Tensor& logits, int64_t first, const RowsOut& out, const Tensor& totals,
    const Upstream& upstream) {
  using K = kernels::cross_entropy_fwd_bwd;
  Tensor x = logits;
  auto walk = walk_logical<1>(call.op, call.rows_of(logits), {&x});
  // What takes any width shares no row out.
  constexpr int64_t kAnyWidth = std::numeric_limits<int64_t>::max();
  const bool aligned = walk.aligned_strides() && aligned16(address(x), address(call.weight));
  // Configs count 16-bit logits.
  const int64_t counted = x.element_size() / 2;
  const auto point = runtime::point_of<K>(K::dtype(dtype_of(x)), call.extras);
  const auto* config = &runtime::first_fit<K>(walk.n * counted, aligned, point);
  int64_t part = config->SHARE / counted;
  int64_t parts = part ? (columns_end(*config, walk.n) + part - 1) / part : 1;
  if (parts > std::min<int64_t>(kMostParts, runtime::multiprocessors(call.device.index()))) {
    config = &runtime::first_fit<K>(kAnyWidth, false, point);
    part = 0;
    parts = 1;
  }
  Tensor shares, arrived;
  if (part) {
    shares = at::empty({walk.rows, parts, 4}, call.target.options().dtype(at::kFloat));
    arrived = at::zeros({walk.rows}, call.target.options().dtype(at::kInt));
  }
  const auto& at = walk.strides[0];
  K::Args args{
      out.loss,
      out.z_loss,
      out.accuracy,
      out.predicted,
      address(x),
      address(x),
      call.target_at(first),
      address(upstream.values),
      address(totals),
      address(call.weight),
      address(call.weight_sum),
      address(shares),
      address(arrived),
      int32_t(walk.rows),
      int32_t(walk.n),
      walk.kernel_inner_rows(),
      at.outer,
      at.inner,
      at.outer,
      at.inner,
      call.target_words,
      upstream.stride,
      o.ignore_index,
      float(o.label_smoothing),
      float(o.lse_square_scale),
      float(o.softcap.value_or(1)),
      call.flags_for(out, o) | (upstream.values.defined() ? kHasGrad : 0)};
  auto variant = runtime::variant_index<K>(*config, point);
  launch<K>(call.op, call.device, variant, {uint32_t(walk.rows * parts)}, args);
  if (!x.is_same(logits)) logits.copy_(x);
}

/// log p_y and the entropy of every row with a target, from the statistics of forward. logits: (rows, n), unit stride.
inline void describe_rows_cuda(
    const CudaCall& call, const Options& o, const Tensor& logits, int64_t first, const void* stats,
    const void* log_prob, const void* entropy) {
  using K = kernels::cross_entropy_describe;
  const int64_t rows = logits.size(0), stride = logits.stride(0);
  bool aligned = ((stride | call.n) & 7) == 0 && aligned16(address(logits));
  const auto& config = runtime::first_fit<K>(call.n, aligned);
  K::Args args{log_prob,
               entropy,
               address(logits),
               call.target_at(first),
               stats,
               int32_t(rows),
               int32_t(call.n),
               stride,
               call.target_words,
               o.ignore_index,
               float(o.softcap.value_or(1)),
               call.flags};
  auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(logits))));
  launch<K>(call.op, call.device, variant, {uint32_t(rows)}, args);
}

inline Results forward_cuda(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Options& o, Wanted wanted) {
  c10::DeviceGuard guard(logits.device());
  Results out = empty_results(logits, target, o, wanted);
  RowBuffers rows(out, target.numel(), o, wanted);
  CudaCall call(op, logits.size(-1), target, weight, o);
  if (target.numel() > 0) forward_rows_cuda(call, o, logits, 0, rows.out);
  if (o.reduced()) sum_rows_cuda(call, o, rows.out, out);
  return out;
}

/// dlogits may be logits.
inline void backward_cuda(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const Tensor& grad, const Options& o) {
  c10::DeviceGuard guard(logits.device());
  Upstream upstream(op, grad, logits, o.reduced());
  if (logits.numel() == 0) return;
  CudaCall call(op, logits.size(-1), target, weight, o);
  backward_rows_cuda(call, o, dlogits, logits, 0, address(stats), totals, upstream);
}

inline Results forward_backward_cuda(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o) {
  c10::DeviceGuard guard(logits.device());
  Results out = empty_results(logits, target, o, {});
  RowBuffers rows(out, target.numel(), o, {});
  CudaCall call(op, logits.size(-1), target, weight, o);
  Results counted;
  if (target.numel() > 0) {
    if (o.mean()) {
      // The gradient needs the divisors before any row is read.
      counted.totals = at::empty({2}, out.loss.options());
      sum_rows_cuda(call, o, {}, counted);
    }
    forward_backward_rows_cuda(call, o, logits, 0, rows.out, counted.totals, Upstream(Tensor()));
  }
  if (o.reduced()) sum_rows_cuda(call, o, rows.out, out, counted.totals);
  return out;
}

inline void scale_cuda(const char* op, Tensor& dlogits, const Tensor& grad) {
  using K = kernels::cross_entropy_scale;
  c10::DeviceGuard guard(dlogits.device());
  Upstream upstream(op, grad, dlogits, grad.dim() == 0);
  if (dlogits.numel() == 0) return;
  Tensor x = dlogits;
  auto walk = walk_logical<1>(op, dlogits.numel() / dlogits.size(-1), {&x});
  bool aligned = walk.aligned_strides() && aligned16(address(x));
  const auto& config = runtime::first_fit<K>(walk.n, aligned);
  const auto& at = walk.strides[0];
  K::Args args{address(x), address(upstream.values), int32_t(walk.n), walk.kernel_inner_rows(), at.outer,
               at.inner,   upstream.stride};
  auto variant = runtime::variant_index<K>(config, runtime::point_of<K>(K::dtype(dtype_of(x))));
  launch<K>(op, dlogits.device(), variant, span_grid(config, walk.rows, walk.n), args);
  if (!x.is_same(dlogits)) dlogits.copy_(x);
}

}  // namespace liger::core::cross_entropy
