// rms_norm and fused_add_rms_norm on CUDA. Launches the kernels of liger_ops/kernels/norms/rms_norm.py.

#include "core/column_sum.h"
#include "core/cuda.h"
#include "core/rows.h"
#include "kernels/rms_norm.h"
#include "ops/norms/rms_norm.h"

namespace liger::ops::rms_norm {

namespace flags = kernels::constants::rms_norm;

Forward Cuda::forward(
    const char* op, const Tensor& x_in, const Tensor& residual_in, const Tensor& weight_in, double eps, double offset,
    std::string_view casting_mode, bool save_rstd) {
  using K = kernels::rms_norm_fwd;
  c10::DeviceGuard guard(x_in.device());
  Tensor x = x_in, residual = residual_in, weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  Forward out;
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
  int32_t flags = (weight.defined() ? flags::HAS_WEIGHT : 0) |
      (core::rounds_first(casting_mode) ? flags::ROUND_FIRST : 0) | (save_rstd ? flags::SAVE_RSTD : 0);
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

std::tuple<Tensor, Tensor> Cuda::backward(
    const Tensor& dy_in, const Tensor& ds_in, const Tensor& x_in, const Tensor& weight_in, const Tensor& rstd_in,
    double offset, std::string_view casting_mode, const Tensor& dx, bool needs_dweight) {
  Tensor dy = dy_in, ds = ds_in, x = x_in;
  using K = kernels::rms_norm_bwd;
  const char* op = "rms_norm backward";
  c10::DeviceGuard guard(x.device());
  Tensor weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  Tensor dweight = needs_dweight ? at::empty_like(weight) : Tensor();
  if (x.numel() == 0) return {dx, needs_dweight ? dweight.zero_() : dweight};
  // The kernel always writes dx. If dx is not needed (frozen inputs), a temporary buffer receives it.
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
  int32_t flags = (weight.defined() ? flags::HAS_WEIGHT : 0) |
      (weight.defined() && core::rounds_first(casting_mode) ? flags::ROUND_FIRST : 0) |
      (needs_dweight ? flags::NEEDS_DWEIGHT : 0) | (final ? flags::FINAL : 0);
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

}  // namespace liger::ops::rms_norm
