#pragma once

// Cross entropy of rows of logits on CPU and CUDA, below dispatch and autograd: what the ops that compute it share.
//
// logits: (..., V) of any strides, target: (...) int64 or int32, weight: (V,), all as check() admits them. Losses and
// statistics are fp32 (fp64 for fp64 logits). A mean divides by the sum of the targets' weights; its z-loss, which has
// no weight, by the number of targets. Both stay on the device.

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>

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
};

enum class Reduction { None, Mean, Sum };

/// What follows the tensors in every schema.
struct Options {
  Reduction reduction;
  int64_t ignore_index;
  double label_smoothing, lse_square_scale;
  std::optional<double> softcap;

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

inline Tensor value_or_undefined(const OptionalTensor& t) { return t ? *t : Tensor(); }

inline at::ScalarType compute_type(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

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
    const int64_t end = std::min(n, block + kBlock);
    int64_t i = block;
    for (; i + kLanes <= end; i += kLanes) {
#pragma omp simd
      for (int64_t k = 0; k < kLanes; ++k) lanes[k] += f(i + k);
    }
#pragma omp simd
    for (int64_t k = 0; k < end - i; ++k) lanes[k] += f(i + k);
    for (C lane : lanes) sum += lane;
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
    T* out, const T* x, const Compute<T>* weight, int64_t n, Compute<T> top, Compute<T> slope,
    Compute<T> tilt, Compute<T> cap) {
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
void backward_row(
    const CpuRows<T>& a, T* out, const T* x, int64_t row, Compute<T> grad, Compute<T> grad_z) {
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

/// Calls f(rows, std::bool_constant<softcap>) with everything but the results filled in.
template <class F>
void with_cpu_rows(
    const char* op, const Tensor& logits, const Tensor& target_in, const Tensor& weight_in, const Options& o,
    const F& f) {
  Tensor target = target_in.to(at::kLong).contiguous();
  Tensor weight = weight_in.defined() ? weight_in.to(compute_type(logits)).contiguous() : weight_in;
  const int64_t n = logits.size(-1);
  const int64_t* y = target.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < target.numel(); ++row) {
    LIGER_CHECK(
        y[row] == o.ignore_index || (y[row] >= 0 && y[row] < n), op, "target",
        c10::str("lie in [0, ", n, ") or be ignore_index, ", o.ignore_index), y[row]);
  }
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

/// (sum of w_y, number of targets)
template <class T>
std::array<double, 2> count_targets(const CpuRows<T>& a) {
  double weight = 0, count = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    if (a.target[row] == a.options.ignore_index) continue;
    weight += a.weight_of(a.target[row]);
    count += 1;
  }
  return {weight, count};
}

inline Results forward_cpu(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Options& o, Wanted wanted) {
  runtime::count_cpu_call();
  Results out = empty_results(logits, target, o, wanted);
  auto walk = walk_logical<1>(op, target.numel(), {&logits});
  with_cpu_rows(op, logits, target, weight, o, [&](auto& a, auto cap) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(a.logits)>>;
    using C = Compute<T>;
    bool z_rows = wanted.metrics || o.lse_square_scale != 0;
    Tensor scratch = o.reduced() ? at::empty({3, a.rows}, out.loss.options()) : Tensor();
    C* rows_of = data_or_null<C>(scratch);
    a.loss = rows_of ? rows_of : data_or_null<C>(out.loss);
    a.z_loss = !z_rows ? nullptr : rows_of ? rows_of + a.rows : data_or_null<C>(out.z_loss);
    a.accuracy = rows_of ? rows_of + 2 * a.rows : data_or_null<C>(out.accuracy);
    a.predicted = data_or_null<int64_t>(out.predicted);
    a.stats = data_or_null<C>(out.stats);
    parallel_ranges(a.rows, cpu_ranges(a.rows, a.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        forward_row<decltype(cap)::value>(a, a.logits + walk.strides[0].offset(row, walk.inner_rows), row);
      }
    });
    if (!o.reduced()) return;
    auto totals = count_targets(a);
    double loss = 0, z_loss = 0, right = 0;
    for (int64_t row = 0; row < a.rows; ++row) {
      loss += a.loss[row];
      if (z_rows) z_loss += a.z_loss[row];
      if (wanted.metrics) right += a.accuracy[row];
    }
    // 0 / 0 without any target: NaN, as in PyTorch.
    double by_weight = o.mean() ? totals[0] : 1, by_count = o.mean() ? totals[1] : 1;
    out.loss.fill_(loss / by_weight + (z_rows ? z_loss / by_count : 0));
    if (wanted.metrics) {
      out.z_loss.fill_(z_loss / by_count);
      out.accuracy.fill_(right / by_count);
    }
    if (out.totals.defined()) std::copy(totals.begin(), totals.end(), out.totals.template data_ptr<C>());
  });
  return out;
}

/// dlogits may be logits.
inline void backward_cpu(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const OptionalTensor& grad, const Options& o) {
  runtime::count_cpu_call();
  std::optional<Upstream> upstream;
  if (grad) upstream.emplace(op, *grad, logits, o.reduced());
  if (logits.numel() == 0) return;
  Tensor out = dlogits;
  auto walk = walk_logical<2>(op, target.numel(), {&out, &logits});
  with_cpu_rows(op, logits, target, weight, o, [&](auto& a, auto cap) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(a.logits)>>;
    using C = Compute<T>;
    T* to = out.template data_ptr<T>();
    // Read alone: the rows' code takes it as it takes what forward writes.
    a.stats = const_cast<C*>(stats.const_data_ptr<C>());
    const C* grads = upstream ? upstream->values.template const_data_ptr<C>() : nullptr;
    const C* divisors = o.mean() ? totals.const_data_ptr<C>() : nullptr;
    parallel_ranges(a.rows, cpu_ranges(a.rows, a.n), [&](int64_t, int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const C g = grads ? grads[row * upstream->stride] : C(1);
        T* dx = to + walk.strides[0].offset(row, walk.inner_rows);
        const T* x = a.logits + walk.strides[1].offset(row, walk.inner_rows);
        const C by_weight = divisors ? divisors[0] : C(1), by_count = divisors ? divisors[1] : C(1);
        backward_row<decltype(cap)::value>(a, dx, x, row, g / by_weight, g / by_count);
      }
    });
  });
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

inline Results forward_backward_cpu(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o) {
  Results out = forward_cpu(op, logits, target, weight, o, {false, true});
  backward_cpu(op, logits, logits, target, weight, out.stats, out.totals, std::nullopt, o);
  return out;
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
  Tensor target, weight, weight_sum;
  int32_t target_words, flags;
  bool extras;

  CudaCall(const char* name, const Tensor& logits, const Tensor& target_in, const Tensor& weight_in, const Options& o)
      : op(name), device(logits.device()), target(target_in.contiguous()) {
    if (weight_in.defined()) weight = weight_in.to(at::kFloat).contiguous();
    if (weight.defined() && o.label_smoothing > 0) weight_sum = weight.sum();
    target_words = target.scalar_type() == at::kLong ? 2 : 1;
    flags = o.flags(weight);
    extras = flags & (kHasWeight | kHasSmoothing | kHasSoftcap);
  }
};

template <class Config>
runtime::Grid span_grid(const Config& config, int64_t rows, int64_t n) {
  int64_t span = int64_t(config.BLOCK_N) * config.BLOCKS;
  return {uint32_t(rows * ((n + span - 1) / span))};
}

/// Where the rows' kernels write: straight into the results if those are not reduced.
struct RowBuffers {
  Tensor scratch;
  const void *loss = nullptr, *z_loss = nullptr, *accuracy = nullptr, *predicted = nullptr;

  RowBuffers() = default;
  RowBuffers(const Results& out, int64_t rows, const Options& o, Wanted wanted)
      : predicted(address(out.predicted)) {
    if (!o.reduced()) {
      loss = address(out.loss);
      z_loss = address(out.z_loss);
      accuracy = address(out.accuracy);
      return;
    }
    bool z_rows = wanted.metrics || o.lse_square_scale != 0;
    scratch = at::empty({1 + z_rows + wanted.metrics, rows}, out.loss.options());
    auto* floats = static_cast<const float*>(address(scratch));
    loss = floats;
    if (z_rows) z_loss = floats + rows;
    if (wanted.metrics) accuracy = floats + 2 * rows;
  }

  int32_t flags(const CudaCall& call, const Options& o, Wanted wanted) const {
    return call.flags | (wanted.stats ? kSaveStats : 0) | (z_loss ? kSaveZLoss : 0) |
        (wanted.metrics ? kSaveMetrics : 0) | (o.reduced() ? 0 : kAddZLoss);
  }
};

/// Losses and metrics of all rows -> the call's results. Without `rows_of.loss`: out.totals alone.
inline void sum_rows(
    const CudaCall& call, const Options& o, const RowBuffers& rows_of, const Results& out, int64_t n, Wanted wanted) {
  using K = kernels::cross_entropy_sum;
  const auto& config = runtime::first_fit(K::configs, n, false);
  const int64_t rows = call.target.numel(), blocks = (rows + config.BLOCK - 1) / config.BLOCK;
  // One program reads a few blocks faster than a second launch starts.
  const int64_t shares = blocks <= 16 ? 1 : std::min<int64_t>(1024, blocks);
  Tensor partial = shares > 1 ? at::empty({shares, 5}, out.loss.options()) : Tensor();
  int32_t flags = (call.flags & (kHasWeight | kMean)) | (rows_of.z_loss ? kSaveZLoss : 0) |
      (wanted.metrics ? kSaveMetrics : 0) | (out.totals.defined() ? kSaveTotals : 0) | (rows_of.loss || rows == 0 ? 0 : kCountOnly);
  K::Args args{
      address(out.loss), address(out.z_loss), address(out.accuracy), address(out.totals),
      address(partial), rows_of.loss, rows_of.z_loss, rows_of.accuracy, address(call.target),
      address(call.weight), int32_t(rows), int32_t(n), call.target_words, o.ignore_index, flags};
  auto variant = runtime::variant_index<K>(config, K::dtype(runtime::DType::F32));
  if (shares > 1) {
    args.flags = flags | kToPartial;
    launch<K>(call.op, call.device, variant, {uint32_t(shares)}, args);
    args.flags = flags | kFromPartial;
    args.rows = int32_t(shares);
  }
  launch<K>(call.op, call.device, variant, {1}, args);
}

inline Results forward_cuda(
    const char* op, Tensor logits, const Tensor& target, const Tensor& weight, const Options& o, Wanted wanted) {
  using K = kernels::cross_entropy_fwd;
  c10::DeviceGuard guard(logits.device());
  Results out = empty_results(logits, target, o, wanted);
  RowBuffers rows_of(out, target.numel(), o, wanted);
  CudaCall call(op, logits, target, weight, o);
  auto walk = walk_logical<1>(op, target.numel(), {&logits});
  if (walk.rows > 0) {
    bool aligned = walk.aligned_strides() && aligned16(address(logits), address(call.weight));
    const auto& config = runtime::first_fit(K::configs, walk.n, aligned);
    const auto& from = walk.strides[0];
    K::Args args{
        rows_of.loss, rows_of.z_loss, rows_of.accuracy, rows_of.predicted, address(out.stats),
        address(logits), address(call.target), address(call.weight), address(call.weight_sum),
        int32_t(walk.rows), int32_t(walk.n), walk.kernel_inner_rows(), from.outer, from.inner, call.target_words,
        o.ignore_index, float(o.label_smoothing), float(o.lse_square_scale), float(o.softcap.value_or(1)),
        rows_of.flags(call, o, wanted)};
    auto variant = runtime::variant_index<K>(config, K::dtype(dtype_of(logits)), call.extras);
    launch<K>(op, call.device, variant, {uint32_t(walk.rows)}, args);
  }
  if (o.reduced()) sum_rows(call, o, rows_of, out, walk.n, wanted);
  return out;
}

/// dlogits may be logits.
inline void backward_cuda(
    const char* op, Tensor& dlogits, Tensor logits, const Tensor& target, const Tensor& weight, const Tensor& stats,
    const Tensor& totals, const OptionalTensor& grad, const Options& o) {
  using K = kernels::cross_entropy_bwd;
  c10::DeviceGuard guard(logits.device());
  Upstream upstream(op, *grad, logits, o.reduced());
  if (logits.numel() == 0) return;
  CudaCall call(op, logits, target, weight, o);
  Tensor out = dlogits;
  auto walk = walk_logical<2>(op, target.numel(), {&out, &logits});
  bool aligned = walk.aligned_strides() &&
      aligned16(address(out), address(logits), address(call.weight));
  const auto& config = runtime::first_fit(K::configs, walk.n, aligned);
  const auto& [to, from] = walk.strides;
  K::Args args{
      address(out), address(logits), address(call.target), address(stats),
      address(upstream.values), address(totals), address(call.weight), address(call.weight_sum),
      int32_t(walk.rows), int32_t(walk.n), walk.kernel_inner_rows(), to.outer, to.inner, from.outer, from.inner,
      call.target_words, upstream.stride, o.ignore_index, float(o.label_smoothing), float(o.lse_square_scale),
      float(o.softcap.value_or(1)), call.flags};
  auto variant = runtime::variant_index<K>(config, K::dtype(dtype_of(logits)), call.extras);
  launch<K>(op, call.device, variant, span_grid(config, walk.rows, walk.n), args);
  if (!out.is_same(dlogits)) dlogits.copy_(out);
}

inline Results forward_backward_cuda(
    const char* op, Tensor& logits, const Tensor& target, const Tensor& weight, const Options& o) {
  using K = kernels::cross_entropy_fwd_bwd;
  c10::DeviceGuard guard(logits.device());
  Wanted wanted;
  Results out = empty_results(logits, target, o, wanted);
  RowBuffers rows_of(out, target.numel(), o, wanted);
  CudaCall call(op, logits, target, weight, o);
  Tensor x = logits;
  auto walk = walk_logical<1>(op, target.numel(), {&x});
  if (walk.rows > 0) {
    if (o.mean()) {
      // The gradient needs the divisors before any row is read.
      out.totals = at::empty({2}, out.loss.options());
      sum_rows(call, o, {}, out, walk.n, wanted);
    }
    bool aligned = walk.aligned_strides() && aligned16(address(x), address(call.weight));
    const auto& config = runtime::first_fit(K::configs, walk.n, aligned);
    const auto& at = walk.strides[0];
    K::Args args{
        rows_of.loss, rows_of.z_loss, rows_of.accuracy, rows_of.predicted, address(x), address(x),
        address(call.target), nullptr, address(out.totals), address(call.weight),
        address(call.weight_sum), int32_t(walk.rows), int32_t(walk.n), walk.kernel_inner_rows(), at.outer,
        at.inner, at.outer, at.inner, call.target_words, 0, o.ignore_index, float(o.label_smoothing),
        float(o.lse_square_scale), float(o.softcap.value_or(1)), rows_of.flags(call, o, wanted)};
    auto variant = runtime::variant_index<K>(config, K::dtype(dtype_of(x)), call.extras);
    launch<K>(op, call.device, variant, {uint32_t(walk.rows)}, args);
    if (!x.is_same(logits)) logits.copy_(x);
  }
  if (o.reduced()) sum_rows(call, o, rows_of, out, walk.n, wanted);
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
  const auto& config = runtime::first_fit(K::configs, walk.n, aligned);
  const auto& at = walk.strides[0];
  K::Args args{
      address(x), address(upstream.values), int32_t(walk.n), walk.kernel_inner_rows(), at.outer, at.inner,
      upstream.stride};
  auto variant = runtime::variant_index<K>(config, K::dtype(dtype_of(x)));
  launch<K>(op, dlogits.device(), variant, span_grid(config, walk.rows, walk.n), args);
  if (!x.is_same(dlogits)) dlogits.copy_(x);
}

}  // namespace liger::core::cross_entropy
