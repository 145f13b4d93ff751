// rms_norm(x, weight, eps, offset, casting_mode) = x * rsqrt(mean(x^2) + eps) * (weight + offset)
//
// x: (..., n) of any strides, weight: (n,) in x's dtype or fp32, the result in x's dtype. Statistics are fp32.
// casting_mode says where the normalised row is rounded: "llama" before the weight is applied, as Hugging Face's
// LlamaRMSNorm does; "gemma" and "none" once, at the end.

#include "ops/rms_norm.h"

#include <torch/library.h>

#include "core/autograd.h"
#include "core/column_sum.h"
#include "core/cpu.h"
#include "core/cpu_math.h"
#include "core/cuda.h"
#include "core/memory.h"
#include "core/rows.h"
#include "kernels/rms_norm.h"

namespace liger::ops {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using core::value_or_undefined;

constexpr const char* kOp = "rms_norm";

// Mirrors the constants of liger_ops/kernels/rms_norm.py.
enum Flags : int32_t { kHasWeight = 1, kRoundFirst = 2, kSaveRstd = 8, kNeedsDweight = 16, kFinal = 32 };

bool rounds_first(std::string_view casting_mode) { return casting_mode == "llama"; }

}  // namespace

void check_rms_norm(
    const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
    std::string_view casting_mode) {
  core::check_activation(op, "x", x);
  if (residual.defined()) core::check_same(op, "residual", residual, "x", x);
  if (weight.defined()) core::check_column_parameter(op, "weight", weight, x);
  core::check_eps(op, eps);
  LIGER_CHECK(
      casting_mode == "llama" || casting_mode == "gemma" || casting_mode == "none", op, "casting_mode",
      "be 'llama', 'gemma' or 'none'", "'", casting_mode, "'");
}

// ---- CPU

namespace {

template <class T, class W>
struct CpuForward {
  using C = core::Compute<T>;
  const T *x, *residual;
  const W* weight;
  T *y, *s;
  C* rstd;
  const core::Rows<4>& walk;  // y, s, x, residual
  C eps, offset;
  bool round;
};

// A row of half precision is widened once, and its results are narrowed a block of columns at a time.
template <class T, class W>
LIGER_VECTORIZED void forward_rows(const CpuForward<T, W>& a, int64_t begin, int64_t end) {
  using C = core::Compute<T>;
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n, inner = a.walk.inner_rows;
  std::vector<C> row_stage = core::make_stage<T, C>(n), weights(a.weight ? n : 0);
  C block[kBlock];
  if (a.weight) {
    const C* wide = core::widen_all(a.weight, weights.data(), n);
    for (int64_t i = 0; i < n; ++i) weights[i] = wide[i] + a.offset;
  }
  for (int64_t row = begin; row < end; ++row) {
    const C* x = core::widen_all(a.x + a.walk.strides[2].offset(row, inner), row_stage.data(), n);
    if (a.residual) {
      const T* residual = a.residual + a.walk.strides[3].offset(row, inner);
      T* s = a.s + a.walk.strides[1].offset(row, inner);
      C* sums = core::target(s, row_stage.data());
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        const C *v = x + first, *r = core::widen_all(residual + first, block, count);
        C* sum = sums + first;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) sum[i] = core::round_to<T>(v[i] + r[i]);
        core::narrow_all(s + first, sum, count);
      }
      x = sums;
    }
    double squares = 0;
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C* v = x + first;
      C part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = 0; i < count; ++i) part += v[i] * v[i];
      squares += part;
    }
    const C scale = C(1 / std::sqrt(squares / n + a.eps));
    if (a.rstd) a.rstd[row] = scale;
    T* y = a.y + a.walk.strides[0].offset(row, inner);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *v = x + first, *w = weights.data() + first;
      C* out = core::target(y + first, block);
      if (!a.weight) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = v[i] * scale;
      } else if (a.round) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = core::round_to<T>(v[i] * scale) * w[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = v[i] * scale * w[i];
      }
      core::narrow_all(y + first, out, count);
    }
  }
}

template <class T>
struct CpuBackward {
  using C = core::Compute<T>;
  const T *dy, *ds, *x;
  const C *weight, *rstd;  // weight with its offset
  T* dx;
  const core::Rows<4>& walk;  // dx, dy, ds, x
  bool round;
};

// sums: this range's share of dweight, or null.
template <class T>
LIGER_VECTORIZED void backward_rows(const CpuBackward<T>& a, core::Compute<T>* sums, int64_t begin, int64_t end) {
  using C = core::Compute<T>;
  constexpr int64_t kBlock = core::kColumnsPerSum;
  const int64_t n = a.walk.n, inner = a.walk.inner_rows;
  C blocks[3][kBlock];
  for (int64_t row = begin; row < end; ++row) {
    const T* dy = a.dy + a.walk.strides[1].offset(row, inner);
    const T* x = a.x + a.walk.strides[3].offset(row, inner);
    const C scale = a.rstd[row];
    double dot = 0;
    // One pass for both sums: the row is read from cache once less.
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *g = core::widen_all(dy + first, blocks[0], count), *v = core::widen_all(x + first, blocks[1], count);
      const C* w = a.weight + first;
      C *sum = sums + first, part = 0;
      if (sums && a.round) {
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < count; ++i) {
          sum[i] += g[i] * core::round_to<T>(v[i] * scale);
          part += g[i] * w[i] * v[i];
        }
      } else if (sums) {
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < count; ++i) {
          const C product = g[i] * v[i];
          sum[i] += product * scale;
          part += product * w[i];
        }
      } else {
#pragma omp simd reduction(+ : part)
        for (int64_t i = 0; i < count; ++i) part += g[i] * w[i] * v[i];
      }
      dot += part;
    }
    if (!a.dx) continue;
    T* dx = a.dx + a.walk.strides[0].offset(row, inner);
    const T* ds = a.ds ? a.ds + a.walk.strides[2].offset(row, inner) : nullptr;
    const C mean = C(dot * scale * scale / n);
    for (int64_t first = 0; first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      const C *g = core::widen_all(dy + first, blocks[0], count), *v = core::widen_all(x + first, blocks[1], count);
      const C* w = a.weight + first;
      C* out = core::target(dx + first, blocks[0]);
      if (ds) {
        const C* r = core::widen_all(ds + first, blocks[2], count);
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (g[i] * w[i] - v[i] * mean) * scale + r[i];
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) out[i] = (g[i] * w[i] - v[i] * mean) * scale;
      }
      core::narrow_all(dx + first, out, count);
    }
  }
}

}  // namespace

RmsNormForward rms_norm_forward_cpu(
    const char* op, const Tensor& x_in, Tensor residual, const Tensor& weight_in, double eps, double offset,
    std::string_view casting_mode, bool save_rstd) {
  Tensor x = x_in, weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  runtime::count_cpu_call();
  RmsNormForward out;
  out.y = core::empty_rows_like(x);
  if (residual.defined()) out.s = at::empty_like(out.y);
  if (save_rstd) out.rstd = core::empty_per_row(out.y, core::compute_type(x));
  if (x.numel() == 0) return out;
  auto walk = core::walk_rows<4>(op, {&out.y, &out.s, &x, &residual});
  auto weight_type = weight.defined() ? weight.scalar_type() : x.scalar_type();
  core::dispatch_activation_parameter(x.scalar_type(), weight_type, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    using C = core::Compute<T>;
    CpuForward<T, W> a{
        x.const_data_ptr<T>(),
        core::data_or_null<T>(residual),
        core::data_or_null<W>(weight),
        out.y.data_ptr<T>(),
        core::data_or_null<T>(out.s),
        core::data_or_null<C>(out.rstd),
        walk,
        C(eps),
        C(offset),
        rounds_first(casting_mode)};
    core::parallel_ranges(walk.rows, core::cpu_ranges(walk.rows, walk.n), [&](int64_t, int64_t begin, int64_t end) {
      forward_rows(a, begin, end);
    });
  });
  return out;
}

namespace {

std::tuple<Tensor, Tensor> backward_cpu(
    Tensor dy, Tensor ds, Tensor x, const Tensor& weight_in, const Tensor& rstd_in, double offset,
    std::string_view casting_mode, Tensor dx, bool needs_dweight) {
  runtime::count_cpu_call();
  Tensor weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  Tensor lead = dx.defined() ? dx : core::empty_rows_like(x), rstd = core::per_row(rstd_in, lead);
  auto walk = core::walk_rows<4>(kOp, {&lead, &dy, &ds, &x});
  int64_t ranges = needs_dweight ? core::cpu_sum_ranges(walk.rows, walk.n) : core::cpu_ranges(walk.rows, walk.n);
  core::ColumnShares dweight(needs_dweight, ranges, walk.n, rstd.options());
  if (x.numel() > 0) {
    Tensor scaled = weight.defined() ? weight.to(rstd.scalar_type()).add(offset) : at::ones({walk.n}, rstd.options());
    core::dispatch_activation_parameter(x.scalar_type(), x.scalar_type(), [&](auto t, auto) {
      using T = decltype(t);
      using C = core::Compute<T>;
      CpuBackward<T> a{
          dy.const_data_ptr<T>(),
          core::data_or_null<T>(ds),
          x.const_data_ptr<T>(),
          scaled.const_data_ptr<C>(),
          rstd.const_data_ptr<C>(),
          core::data_or_null<T>(dx),
          walk,
          rounds_first(casting_mode) && weight.defined()};
      core::parallel_ranges(walk.rows, ranges, [&](int64_t range, int64_t begin, int64_t end) {
        backward_rows(a, dweight.of<C>(range), begin, end);
      });
    });
  }
  return {dx, needs_dweight ? dweight.sum(weight.scalar_type()) : Tensor()};
}

}  // namespace

// ---- CUDA

RmsNormForward rms_norm_forward_cuda(
    const char* op, const Tensor& x_in, Tensor residual, const Tensor& weight_in, double eps, double offset,
    std::string_view casting_mode, bool save_rstd) {
  using K = kernels::rms_norm_fwd;
  c10::DeviceGuard guard(x_in.device());
  Tensor x = x_in, weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  RmsNormForward out;
  out.y = core::empty_rows_like(x);
  if (residual.defined()) out.s = at::empty_like(out.y);
  if (save_rstd) out.rstd = core::empty_per_row(out.y, at::kFloat);
  if (x.numel() == 0) return out;
  auto walk = core::walk_rows<4>(op, {&out.y, &out.s, &x, &residual});
  bool aligned =
      walk.aligned_strides() &&
      core::aligned16(
          core::address(out.y), core::address(out.s), core::address(x), core::address(residual), core::address(weight));
  const auto weight_type = weight.defined() ? weight.scalar_type() : x.scalar_type();
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(weight_type)), residual.defined());
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point, walk.rows);
  int32_t flags = (weight.defined() ? kHasWeight : 0) | (rounds_first(casting_mode) ? kRoundFirst : 0) |
      (save_rstd ? kSaveRstd : 0);
  const auto& [y_walk, s_walk, x_walk, residual_walk] = walk.strides;
  K::Args args{
      core::address(out.y),
      core::address(out.s),
      core::address(out.rstd),
      core::address(x),
      core::address(residual),
      core::address(weight),
      int32_t(walk.rows),
      int32_t(walk.n),
      walk.kernel_inner_rows(),
      y_walk.outer,
      y_walk.inner,
      x_walk.outer,
      x_walk.inner,
      residual_walk.outer,
      residual_walk.inner,
      float(eps),
      weight.defined() ? float(offset) : 0.f,
      flags};
  runtime::Grid grid{uint32_t((walk.rows + config.BLOCK_M - 1) / config.BLOCK_M)};
  core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), grid, args);
  return out;
}

namespace {

std::tuple<Tensor, Tensor> backward_cuda(
    Tensor dy, Tensor ds, Tensor x, const Tensor& weight_in, const Tensor& rstd_in, double offset,
    std::string_view casting_mode, Tensor dx, bool needs_dweight) {
  using K = kernels::rms_norm_bwd;
  const char* op = "rms_norm backward";
  c10::DeviceGuard guard(x.device());
  Tensor weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  Tensor dweight = needs_dweight ? at::empty_like(weight) : Tensor();
  if (x.numel() == 0) return {dx, needs_dweight ? dweight.zero_() : dweight};
  // A gradient that nobody asked for goes to a buffer that is dropped: only frozen inputs pay for it.
  Tensor out = dx.defined() ? dx : core::empty_rows_like(x), rstd = core::per_row(rstd_in, out);
  auto walk = core::walk_rows<4>(op, {&out, &dy, &ds, &x});
  bool aligned = walk.aligned_strides() &&
      core::aligned16(
                     core::address(out), core::address(dy), core::address(ds), core::address(x), core::address(weight));
  const auto weight_type = weight.defined() ? weight.scalar_type() : x.scalar_type();
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(weight_type)), ds.defined());
  const auto& config = runtime::first_fit<K>(walk.n, aligned, point, walk.rows);
  int64_t blocks = (walk.rows + config.BLOCK_M - 1) / config.BLOCK_M;
  int64_t programs = core::persistent_programs(x.device(), blocks, config.programs_per_sm);
  const bool final = blocks == 1, adds_up = needs_dweight && !final;
  Tensor partial = adds_up ? at::empty({1, programs, walk.n}, x.options().dtype(at::kFloat)) : Tensor();
  int32_t flags = (weight.defined() ? kHasWeight : 0) |
      (weight.defined() && rounds_first(casting_mode) ? kRoundFirst : 0) | (needs_dweight ? kNeedsDweight : 0) |
      (final ? kFinal : 0);
  const auto& [dx_walk, dy_walk, ds_walk, x_walk] = walk.strides;
  K::Args args{
      core::address(out),
      core::address(dweight),
      core::address(partial),
      core::address(dy),
      core::address(ds),
      core::address(x),
      core::address(weight),
      core::address(rstd),
      int32_t(walk.rows),
      int32_t(walk.n),
      walk.kernel_inner_rows(),
      dx_walk.outer,
      dx_walk.inner,
      dy_walk.outer,
      dy_walk.inner,
      ds_walk.outer,
      ds_walk.inner,
      x_walk.outer,
      x_walk.inner,
      weight.defined() ? float(offset) : 0.f,
      flags};
  core::launch<K>(op, x.device(), runtime::variant_index<K>(config, point), {uint32_t(programs)}, args);
  if (adds_up) core::column_sum(op, partial, dweight);
  return {dx, dweight};
}

}  // namespace

// ---- Meta

RmsNormForward rms_norm_forward_meta(
    const char*, const Tensor& x, Tensor residual, const Tensor&, double, double, std::string_view, bool save_rstd) {
  RmsNormForward out;
  out.y = core::empty_rows_like(x);
  if (residual.defined()) out.s = at::empty_like(out.y);
  if (save_rstd) out.rstd = core::empty_per_row(out.y, core::compute_type(x));
  return out;
}

namespace {

// ---- The dispatched halves: forward that saves, backward, backward into the gradient's own buffer

template <auto forward>
std::tuple<Tensor, Tensor> fwd(
    const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  check_rms_norm(kOp, x, {}, value_or_undefined(weight), eps, mode);
  auto out = forward(kOp, x, {}, value_or_undefined(weight), eps, offset, mode, true);
  return {out.y, out.rstd};
}

template <auto backward>
std::tuple<Tensor, Tensor> bwd(
    const Tensor& dy, const OptionalTensor& ds, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
    double offset, c10::string_view mode, bool needs_dx, bool needs_dweight) {
  Tensor dx = needs_dx ? core::empty_rows_like(x) : Tensor();
  return backward(dy, value_or_undefined(ds), x, value_or_undefined(weight), rstd, offset, mode, dx, needs_dweight);
}

template <auto backward>
Tensor bwd_(
    Tensor& dy, const OptionalTensor& ds, const Tensor& x, const OptionalTensor& weight, const Tensor& rstd,
    double offset, c10::string_view mode, bool needs_dweight) {
  return std::get<1>(
      backward(dy, value_or_undefined(ds), x, value_or_undefined(weight), rstd, offset, mode, dy, needs_dweight));
}

std::tuple<Tensor, Tensor> bwd_meta(
    const Tensor&, const OptionalTensor&, const Tensor& x, const OptionalTensor& weight, const Tensor&, double,
    c10::string_view, bool needs_dx, bool needs_dweight) {
  return {needs_dx ? core::empty_rows_like(x) : Tensor(), needs_dweight ? at::empty_like(*weight) : Tensor()};
}

Tensor bwd_meta_(
    Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor& weight, const Tensor&, double,
    c10::string_view, bool needs_dweight) {
  return needs_dweight ? at::empty_like(*weight) : Tensor();
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& dy, const Tensor& ds, const Tensor& s, const Tensor& weight, const Tensor& rstd, double offset,
    const std::string& casting_mode, bool needs_dx, bool needs_dweight, bool overwrite_dy) {
  if (overwrite_dy && needs_dx) {
    static const auto op = core::find_op<decltype(bwd_<backward_cpu>)>("liger::_rms_norm_bwd_");
    Tensor dx = dy;
    Tensor dweight = op.call(dx, ds, s, weight, rstd, offset, casting_mode, needs_dweight);
    return {dx, dweight};
  }
  static const auto op = core::find_op<decltype(bwd<backward_cpu>)>("liger::_rms_norm_bwd");
  return op.call(dy, ds, s, weight, rstd, offset, casting_mode, needs_dx, needs_dweight);
}

// ---- The public op

namespace {

template <auto forward>
Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  check_rms_norm(kOp, x, {}, value_or_undefined(weight), eps, mode);
  return forward(kOp, x, {}, value_or_undefined(weight), eps, offset, mode, false).y;
}

struct RmsNormBackward : core::BackwardNode<RmsNormBackward, 3> {  // x, weight, rstd
  double offset;
  std::string casting_mode;

  auto state() { return std::tie(offset, casting_mode); }
  std::string name() const override { return kOp; }

  core::variable_list backward(core::variable_list&& grads) override {
    Tensor dy = std::move(grads[0]);
    if (!dy.defined()) return {Tensor(), Tensor()};
    Tensor x = take(0), weight = take(1), rstd = take(2);
    bool overwrite = may_overwrite(dy, x);
    auto [dx, dweight] =
        rms_norm_backward(dy, {}, x, weight, rstd, offset, casting_mode, needs(0), needs(1), overwrite);
    return {dx, dweight};
  }
};

Tensor rms_norm_autograd(
    const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  core::check_dense(kOp, "x", x);
  core::check_dense(kOp, "weight", weight);
  core::check_no_forward_ad(kOp, x, weight);
  if (!torch::autograd::compute_requires_grad(x, weight)) {
    static const auto op = core::find_op<decltype(rms_norm<rms_norm_forward_meta>)>("liger::rms_norm");
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(x, weight, eps, offset, mode);
  }
  auto node = core::make_node<RmsNormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
  node->offset = offset;
  node->casting_mode = mode;
  Tensor y, rstd;
  {
    static const auto op = core::find_op<decltype(fwd<rms_norm_forward_meta>)>("liger::_rms_norm_fwd");
    at::AutoDispatchBelowADInplaceOrView below;
    std::tie(y, rstd) = op.call(x, weight, eps, offset, mode);
  }
  node->saved = {core::SavedVariable(x, false), core::SavedVariable(weight, false), core::SavedVariable(rstd, false)};
  torch::autograd::set_history(y, node);
  return y;
}

// PyTorch's policy for its own norms on CUDA: float32 in and out, since the release that says so.
Tensor rms_norm_autocast(
    const Tensor& x, const OptionalTensor& weight, double eps, double offset, c10::string_view mode) {
  static const auto op = core::find_op<decltype(rms_norm<rms_norm_forward_meta>)>("liger::rms_norm");
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  if (!core::torch_autocasts_to_float("rms_norm")) return op.call(x, weight, eps, offset, mode);
  return op.call(core::autocast_float(x), core::autocast_float(weight), eps, offset, mode);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def(
      "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-6, float offset=0.0, str casting_mode=\"llama\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_rms_norm_fwd(Tensor x, Tensor? weight, float eps, float offset, str casting_mode) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_rms_norm_bwd(Tensor dy, Tensor? ds, Tensor x, Tensor? weight, Tensor rstd, float offset, str casting_mode, "
      "bool needs_dx, bool needs_dweight) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_rms_norm_bwd_(Tensor(a!) dy, Tensor? ds, Tensor x, Tensor? weight, Tensor rstd, float offset, str "
      "casting_mode, "
      "bool needs_dweight) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(liger, CPU, m) {
  core::implement<rms_norm<rms_norm_forward_cpu>>(m, "rms_norm");
  core::implement<fwd<rms_norm_forward_cpu>>(m, "_rms_norm_fwd");
  core::implement<bwd<backward_cpu>>(m, "_rms_norm_bwd");
  core::implement<bwd_<backward_cpu>>(m, "_rms_norm_bwd_");
}

TORCH_LIBRARY_IMPL(liger, CUDA, m) {
  core::implement<rms_norm<rms_norm_forward_cuda>>(m, "rms_norm");
  core::implement<fwd<rms_norm_forward_cuda>>(m, "_rms_norm_fwd");
  core::implement<bwd<backward_cuda>>(m, "_rms_norm_bwd");
  core::implement<bwd_<backward_cuda>>(m, "_rms_norm_bwd_");
}

TORCH_LIBRARY_IMPL(liger, Meta, m) {
  m.impl("rms_norm", rms_norm<rms_norm_forward_meta>);
  m.impl("_rms_norm_fwd", fwd<rms_norm_forward_meta>);
  m.impl("_rms_norm_bwd", bwd_meta);
  m.impl("_rms_norm_bwd_", bwd_meta_);
}

TORCH_LIBRARY_IMPL(liger, Autograd, m) { m.impl("rms_norm", rms_norm_autograd); }

TORCH_LIBRARY_IMPL(liger, AutocastCUDA, m) { core::implement<rms_norm_autocast>(m, "rms_norm"); }

}  // namespace liger::ops
