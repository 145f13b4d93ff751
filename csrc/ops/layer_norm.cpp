// layer_norm(x, weight, bias, eps) = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias
//
// x: (..., n) of any strides; weight, bias: (n,) in x's dtype or fp32, either may be absent; the result in x's dtype.
// Statistics are fp32.

#include <torch/library.h>

#include "core/autograd.h"
#include "core/column_sum.h"
#include "core/cpu.h"
#include "core/cpu_math.h"
#include "core/cuda.h"
#include "core/memory.h"
#include "core/rows.h"
#include "kernels/layer_norm.h"

namespace liger::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "layer_norm";

// Mirrors the constants of liger_ops/kernels/layer_norm.py.
enum Flags : int32_t {
  kHasWeight = 1,
  kHasBias = 2,
  kSaveStatistics = 4,
  kNeedsDweight = 8,
  kNeedsDbias = 16,
  kFinal = 32
};

Tensor contiguous_or_undefined(const OptionalTensor& t) { return t && t->defined() ? t->contiguous() : Tensor(); }

// Means, then reciprocal standard deviations: (2, ...rows of x).
Tensor empty_statistics(const Tensor& y) { return core::empty_per_row(y, core::compute_type(y), 2); }

at::ScalarType parameter_type(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return weight.defined() ? weight.scalar_type() : bias.defined() ? bias.scalar_type() : x.scalar_type();
}

void check(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  core::check_activation(kOp, "x", x);
  if (weight && weight->defined()) core::check_column_parameter(kOp, "weight", *weight, x);
  if (bias && bias->defined()) core::check_column_parameter(kOp, "bias", *bias, x);
  if (weight && bias && weight->defined() && bias->defined()) {
    LIGER_CHECK(
        weight->scalar_type() == bias->scalar_type(), kOp, "bias",
        c10::str("have the dtype of weight, ", weight->scalar_type()), bias->scalar_type());
  }
  core::check_eps(kOp, eps);
}

struct Forward {
  Tensor y, statistics;
};

struct Gradients {
  Tensor dx, dweight, dbias;
};

// ---- CPU

template <class T, class W>
struct CpuForward {
  using C = core::Compute<T>;
  const T* x;
  const W *weight, *bias;
  T* y;
  C *means, *scales;
  const core::Rows<2>& walk;  // y, x
  C eps;
};

// A row of half precision is widened once, and its results are narrowed a block of columns at a time.
template <class T, class W>
LIGER_VECTORIZED void forward_rows(const CpuForward<T, W>& a, int64_t begin, int64_t end) {
  using C = core::Compute<T>;
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n, inner = a.walk.inner_rows;
  std::vector<C> row_stage = core::make_stage<T, C>(n), parameter_stage = core::make_stage<W, C>(2 * n);
  const C* weight = a.weight ? core::widen_all(a.weight, parameter_stage.data(), n) : nullptr;
  const C* bias = a.bias ? core::widen_all(a.bias, parameter_stage.data() + n, n) : nullptr;
  C block[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const C* x = core::widen_all(a.x + a.walk.strides[1].offset(row, inner), row_stage.data(), n);
    double total = 0, squares = 0, drift = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C* v = x + first;
      C part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = 0; i < count; ++i) part += v[i];
      total += part;
    }
    // A sum of fp32 values much larger than their deviations is good to a few units in the last place of the mean:
    // the sum of the centred values says how far it is off.
    const C near = C(total / n);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C* v = x + first;
      C squares_part = 0, drift_part = 0;
#pragma omp simd reduction(+ : squares_part, drift_part)
      for (int64_t i = 0; i < count; ++i) {
        const C centred = v[i] - near;
        squares_part += centred * centred;
        drift_part += centred;
      }
      squares += squares_part;
      drift += drift_part;
    }
    const C mean = C(near + drift / n);
    squares -= drift * drift / n;
    const C scale = C(1 / std::sqrt(squares / n + a.eps));
    if (a.means) {
      a.means[row] = mean;
      a.scales[row] = scale;
    }
    T* y = a.y + a.walk.strides[0].offset(row, inner);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *v = x + first, *w = weight + first, *b = bias + first;
      C* out = core::target(y + first, block);
      if (weight && bias) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale * w[i] + b[i];
      } else if (weight) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale * w[i];
      } else if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale + b[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (v[i] - mean) * scale;
      }
      core::narrow_all(y + first, out, count);
    }
  }
}

template <class T>
struct CpuBackward {
  using C = core::Compute<T>;
  const T *dy, *x;
  const C *weight, *means, *scales;
  T* dx;
  const core::Rows<3>& walk;  // dx, dy, x
};

// dweight, dbias: this range's shares, both or neither.
template <class T>
LIGER_VECTORIZED void backward_rows(
    const CpuBackward<T>& a, core::Compute<T>* dweight, core::Compute<T>* dbias, int64_t begin, int64_t end) {
  using C = core::Compute<T>;
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n, inner = a.walk.inner_rows;
  C blocks[2][kBlock];
  // A block of columns of several rows at a time: the sums over rows stay in the first-level cache meanwhile.
  constexpr int64_t kRowsAtATime = 8;
  for (int64_t group = begin; group < end; group += kRowsAtATime) {
    const int64_t rows = std::min(kRowsAtATime, end - group);
    double dots[kRowsAtATime] = {}, totals[kRowsAtATime] = {};
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C* w = a.weight + first;
      C *dw = dweight + first, *db = dbias + first;
      for (int64_t r = 0; r < rows; ++r) {
        const C* g = core::widen_all(a.dy + a.walk.strides[1].offset(group + r, inner) + first, blocks[0], count);
        const C* v = core::widen_all(a.x + a.walk.strides[2].offset(group + r, inner) + first, blocks[1], count);
        const C mean = a.means[group + r], scale = a.scales[group + r];
        C dot = 0, total = 0;
        if (dweight) {
#pragma omp simd reduction(+ : dot, total)
          for (int64_t i = 0; i < count; ++i) {
            const C grad = g[i], product = grad * (v[i] - mean);
            dw[i] += product * scale;
            db[i] += grad;
            dot += product * w[i];
            total += grad * w[i];
          }
        } else {
#pragma omp simd reduction(+ : dot, total)
          for (int64_t i = 0; i < count; ++i) {
            const C grad = g[i] * w[i];
            dot += grad * (v[i] - mean);
            total += grad;
          }
        }
        dots[r] += dot;
        totals[r] += total;
      }
    }
    if (!a.dx) continue;
    for (int64_t r = 0; r < rows; ++r) {
      const T* dy = a.dy + a.walk.strides[1].offset(group + r, inner);
      const T* x = a.x + a.walk.strides[2].offset(group + r, inner);
      T* dx = a.dx + a.walk.strides[0].offset(group + r, inner);
      const C mean = a.means[group + r], scale = a.scales[group + r];
      const C slope = C(dots[r] * scale * scale / n), shift = C(totals[r] / n);
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *g = core::widen_all(dy + first, blocks[0], count), *v = core::widen_all(x + first, blocks[1], count);
        const C* w = a.weight + first;
        C* out = core::target(dx + first, blocks[0]);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (g[i] * w[i] - shift - (v[i] - mean) * slope) * scale;
        core::narrow_all(dx + first, out, count);
      }
    }
  }
}

Forward forward_cpu(
    const Tensor& x_in, const OptionalTensor& weight_in, const OptionalTensor& bias_in, double eps, bool save) {
  check(x_in, weight_in, bias_in, eps);
  runtime::count_cpu_call();
  Tensor x = x_in, weight = contiguous_or_undefined(weight_in), bias = contiguous_or_undefined(bias_in);
  Forward out{core::empty_rows_like(x), {}};
  if (save) out.statistics = empty_statistics(out.y);
  if (x.numel() == 0) return out;
  auto walk = core::walk_rows<2>(kOp, {&out.y, &x});
  core::dispatch_activation_parameter(x.scalar_type(), parameter_type(x, weight, bias), [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    using C = core::Compute<T>;
    C* means = core::data_or_null<C>(out.statistics);
    CpuForward<T, W> a{
        x.const_data_ptr<T>(),
        core::data_or_null<W>(weight),
        core::data_or_null<W>(bias),
        out.y.data_ptr<T>(),
        means,
        means ? means + walk.rows : nullptr,
        walk,
        C(eps)};
    core::parallel_ranges(walk.rows, core::cpu_ranges(walk.rows, walk.n), [&](int64_t, int64_t begin, int64_t end) {
      forward_rows(a, begin, end);
    });
  });
  return out;
}

Gradients backward_cpu(
    Tensor dy, Tensor x, const OptionalTensor& weight_in, const Tensor& statistics_in, Tensor dx, bool needs_dweight,
    bool needs_dbias, at::ScalarType parameters) {
  runtime::count_cpu_call();
  Tensor lead = dx.defined() ? dx : core::empty_rows_like(x), statistics = core::per_row(statistics_in, lead);
  auto walk = core::walk_rows<3>(kOp, {&lead, &dy, &x});
  bool needs_parameters = needs_dweight || needs_dbias;
  int64_t ranges = needs_parameters ? core::cpu_sum_ranges(walk.rows, walk.n) : core::cpu_ranges(walk.rows, walk.n);
  // The rows' code fills both or neither.
  core::ColumnShares dweight(needs_parameters, ranges, walk.n, statistics.options());
  core::ColumnShares dbias(needs_parameters, ranges, walk.n, statistics.options());
  if (x.numel() > 0) {
    Tensor weight = contiguous_or_undefined(weight_in);
    weight = weight.defined() ? weight.to(statistics.scalar_type()) : at::ones({walk.n}, statistics.options());
    core::dispatch_activation_parameter(x.scalar_type(), x.scalar_type(), [&](auto t, auto) {
      using T = decltype(t);
      using C = core::Compute<T>;
      const C* means = statistics.const_data_ptr<C>();
      CpuBackward<T> a{
          dy.const_data_ptr<T>(),
          x.const_data_ptr<T>(),
          weight.const_data_ptr<C>(),
          means,
          means + walk.rows,
          core::data_or_null<T>(dx),
          walk};
      core::parallel_ranges(walk.rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        backward_rows(a, dweight.of<C>(range), dbias.of<C>(range), begin, end);
      });
    });
  }
  return {dx, needs_dweight ? dweight.sum(parameters) : Tensor(), needs_dbias ? dbias.sum(parameters) : Tensor()};
}

// ---- CUDA

Forward forward_cuda(
    const Tensor& x_in, const OptionalTensor& weight_in, const OptionalTensor& bias_in, double eps, bool save) {
  using K = kernels::layer_norm_fwd;
  check(x_in, weight_in, bias_in, eps);
  c10::DeviceGuard guard(x_in.device());
  Tensor x = x_in, weight = contiguous_or_undefined(weight_in), bias = contiguous_or_undefined(bias_in);
  Forward out{core::empty_rows_like(x), {}};
  if (save) out.statistics = empty_statistics(out.y);
  if (x.numel() == 0) return out;
  auto walk = core::walk_rows<2>(kOp, {&out.y, &x});
  bool aligned = walk.aligned_strides() &&
      core::aligned16(core::address(out.y), core::address(x), core::address(weight), core::address(bias));
  const auto parameters = parameter_type(x, weight, bias);
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(parameters)));
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point, walk.rows);
  int32_t flags = (weight.defined() ? kHasWeight : 0) | (bias.defined() ? kHasBias : 0) | (save ? kSaveStatistics : 0);
  const auto& [y_walk, x_walk] = walk.strides;
  K::Args args{core::address(out.y), core::address(out.statistics),
               core::address(x),     core::address(weight),
               core::address(bias),  int32_t(walk.rows),
               int32_t(walk.n),      walk.kernel_inner_rows(),
               y_walk.outer,         y_walk.inner,
               x_walk.outer,         x_walk.inner,
               float(eps),           flags};
  runtime::Grid grid{uint32_t((walk.rows + config.BLOCK_M - 1) / config.BLOCK_M)};
  core::launch<K>(kOp, x.device(), runtime::variant_index<K>(config, point), grid, args);
  return out;
}

Gradients backward_cuda(
    Tensor dy, Tensor x, const OptionalTensor& weight_in, const Tensor& statistics_in, Tensor dx, bool needs_dweight,
    bool needs_dbias, at::ScalarType parameters) {
  using K = kernels::layer_norm_bwd;
  const char* op = "layer_norm backward";
  c10::DeviceGuard guard(x.device());
  Tensor weight = contiguous_or_undefined(weight_in);
  int64_t n = x.size(-1);
  auto parameter = [&](bool needed) { return needed ? at::empty({n}, x.options().dtype(parameters)) : Tensor(); };
  Gradients out{dx, parameter(needs_dweight), parameter(needs_dbias)};
  if (x.numel() == 0) {
    for (Tensor* t : {&out.dweight, &out.dbias}) {
      if (t->defined()) t->zero_();
    }
    return out;
  }
  // A gradient that nobody asked for goes to a buffer that is dropped: only frozen inputs pay for it.
  Tensor written = dx.defined() ? dx : core::empty_rows_like(x), statistics = core::per_row(statistics_in, written);
  auto walk = core::walk_rows<3>(op, {&written, &dy, &x});
  bool aligned = walk.aligned_strides() &&
      core::aligned16(core::address(written), core::address(dy), core::address(x), core::address(weight));
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(parameters)));
  const auto& config = runtime::first_fit<K>(n, aligned, point, walk.rows);
  int64_t blocks = (walk.rows + config.BLOCK_M - 1) / config.BLOCK_M;
  int64_t programs = core::persistent_programs(x.device(), blocks, config.programs_per_sm);
  const bool final = blocks == 1, adds_up = (needs_dweight || needs_dbias) && !final;
  Tensor partial = adds_up ? at::empty({2, programs, n}, x.options().dtype(at::kFloat)) : Tensor();
  int32_t flags = (weight.defined() ? kHasWeight : 0) | (needs_dweight ? kNeedsDweight : 0) |
      (needs_dbias ? kNeedsDbias : 0) | (final ? kFinal : 0);
  const auto& [dx_walk, dy_walk, x_walk] = walk.strides;
  K::Args args{
      core::address(written),
      core::address(out.dweight),
      core::address(out.dbias),
      core::address(partial),
      core::address(dy),
      core::address(x),
      core::address(weight),
      core::address(statistics),
      int32_t(walk.rows),
      int32_t(n),
      walk.kernel_inner_rows(),
      dx_walk.outer,
      dx_walk.inner,
      dy_walk.outer,
      dy_walk.inner,
      x_walk.outer,
      x_walk.inner,
      flags};
  core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
  if (adds_up && needs_dweight && needs_dbias) {
    core::column_sum(op, partial, out.dweight, out.dbias);
  } else if (adds_up) {
    core::column_sum(op, partial.narrow(0, needs_dweight ? 0 : 1, 1), needs_dweight ? out.dweight : out.dbias);
  }
  return out;
}

// ---- Meta

Forward forward_meta(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool save) {
  check(x, weight, bias, eps);
  Forward out{core::empty_rows_like(x), {}};
  if (save) out.statistics = empty_statistics(out.y);
  return out;
}

Gradients backward_meta(
    Tensor, Tensor x, const OptionalTensor&, const Tensor&, Tensor dx, bool needs_dweight, bool needs_dbias,
    at::ScalarType parameters) {
  auto parameter = [&](bool needed) {
    return needed ? at::empty_symint({x.sym_sizes().back()}, x.options().dtype(parameters)) : Tensor();
  };
  return {dx, parameter(needs_dweight), parameter(needs_dbias)};
}

// ---- The dispatched ops, over the three backends

template <auto forward>
Tensor layer_norm(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  return forward(x, weight, bias, eps, false).y;
}

template <auto forward>
std::tuple<Tensor, Tensor> fwd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  auto out = forward(x, weight, bias, eps, true);
  return {out.y, out.statistics};
}

template <auto backward>
std::tuple<Tensor, Tensor, Tensor> bwd(
    const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics, bool needs_dx,
    bool needs_dweight, bool needs_dbias, at::ScalarType parameters) {
  Tensor dx = needs_dx ? core::empty_rows_like(x) : Tensor();
  auto out = backward(dy, x, weight, statistics, dx, needs_dweight, needs_dbias, parameters);
  return {out.dx, out.dweight, out.dbias};
}

// Writes dx over dy.
template <auto backward>
std::tuple<Tensor, Tensor> bwd_(
    Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics, bool needs_dweight,
    bool needs_dbias, at::ScalarType parameters) {
  auto out = backward(dy, x, weight, statistics, dy, needs_dweight, needs_dbias, parameters);
  return {out.dweight, out.dbias};
}

// ---- Autograd and autocast

struct LayerNormBackward : core::BackwardNode<LayerNormBackward, 3> {  // x, weight, statistics
  at::ScalarType parameters;

  auto state() { return std::tie(parameters); }
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor(), Tensor()};
    Tensor x = take(0), weight = take(1), statistics = take(2);
    bool needs_dx = needs(0);
    bool needs_dweight = needs(1), needs_dbias = needs(2);
    if (needs_dx && may_overwrite(dy, x)) {
      static const auto op = core::find_op<decltype(bwd_<backward_meta>)>("liger::_layer_norm_bwd_");
      auto [dweight, dbias] = op.call(dy, x, weight, statistics, needs_dweight, needs_dbias, parameters);
      return {dy, dweight, dbias};
    }
    static const auto op = core::find_op<decltype(bwd<backward_meta>)>("liger::_layer_norm_bwd");
    auto [dx, dweight, dbias] = op.call(dy, x, weight, statistics, needs_dx, needs_dweight, needs_dbias, parameters);
    return {dx, dweight, dbias};
  }
};

Tensor layer_norm_autograd(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  core::check_dense(kOp, "x", x);
  core::check_dense(kOp, "weight", weight);
  core::check_dense(kOp, "bias", bias);
  core::check_no_forward_ad(kOp, x, weight, bias);
  if (!torch::autograd::compute_requires_grad(x, weight, bias)) {
    static const auto op = core::find_op<decltype(layer_norm<forward_meta>)>("liger::layer_norm");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, weight, bias, eps);
  }
  auto node = core::make_node<LayerNormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  node->parameters = parameter_type(x, weight.value_or(Tensor()), bias.value_or(Tensor()));
  Tensor y, statistics;
  {
    static const auto op = core::find_op<decltype(fwd<forward_meta>)>("liger::_layer_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, statistics) = op.call(x, weight, bias, eps);
  }
  node->saved = {
      core::SavedVariable(x, false), core::SavedVariable(weight, false), core::SavedVariable(statistics, false)};
  torch::autograd::set_history(y, node);
  return y;
}

// PyTorch's policy for norms on CUDA: float32 in and out.
Tensor layer_norm_autocast(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  static const auto op = core::find_op<decltype(layer_norm<forward_meta>)>("liger::layer_norm");
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  return op.call(core::autocast_float(x), core::autocast_float(weight), core::autocast_float(bias), eps);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def(
      "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_layer_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor statistics, bool needs_dx, bool needs_dweight, "
      "bool needs_dbias, ScalarType parameters) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_layer_norm_bwd_(Tensor(a!) dy, Tensor x, Tensor? weight, Tensor statistics, bool needs_dweight, bool "
      "needs_dbias, "
      "ScalarType parameters) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(liger, CPU, m) {
  core::implement<layer_norm<forward_cpu>>(m, "layer_norm");
  core::implement<fwd<forward_cpu>>(m, "_layer_norm_fwd");
  core::implement<bwd<backward_cpu>>(m, "_layer_norm_bwd");
  core::implement<bwd_<backward_cpu>>(m, "_layer_norm_bwd_");
}

TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  core::implement<layer_norm<forward_cuda>>(m, "layer_norm");
  core::implement<fwd<forward_cuda>>(m, "_layer_norm_fwd");
  core::implement<bwd<backward_cuda>>(m, "_layer_norm_bwd");
  core::implement<bwd_<backward_cuda>>(m, "_layer_norm_bwd_");
}

TORCH_LIBRARY_IMPL(liger, Meta, m) {
  m.impl("layer_norm", layer_norm<forward_meta>);
  m.impl("_layer_norm_fwd", fwd<forward_meta>);
  m.impl("_layer_norm_bwd", bwd<backward_meta>);
  m.impl("_layer_norm_bwd_", bwd_<backward_meta>);
}

TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl("layer_norm", layer_norm_autograd); }

TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { core::implement<layer_norm_autocast>(m, "layer_norm"); }

}  // namespace liger::ops
