// rms_norm and fused_add_rms_norm on CUDA. Launches the kernels of liger_ops/kernels/norms/rms_norm.py.

#include "kernels/rms_norm.h"
#include "core/cuda/column_sum.h"
#include "ops/norms/rms_norm.h"

namespace liger::ops::rms_norm {

namespace flags = kernels::constants::rms_norm;

namespace {

template <class K>
runtime::Point point_of(const Tensor& x, const Tensor& weight, const Tensor& residual) {
  const auto parameters = core::dtype_of(weight.defined() ? weight : x);
  return runtime::point_of<K>(K::dtype(core::dtype_of(x), parameters), residual.defined());
}

}  // namespace

void Cuda::forward(
    const char* op, Forward& out, Tensor x, Tensor residual, Tensor weight, double eps, double offset,
    std::string_view casting_mode) {
  using K = kernels::rms_norm_fwd;
  c10::DeviceGuard guard(x.device());
  if (x.numel() == 0) return;
  if (weight.defined()) weight = weight.contiguous();
  const auto walk = core::walk_rows<4>(op, {&out.y, &out.s, &x, &residual});
  K::Args args{
      .y = core::address(out.y),
      .s = core::address(out.s),
      .rstd = core::address(out.rstd),
      .x = core::address(x),
      .residual = core::address(residual),
      .weight = core::address(weight),
      .y_strides = walk.strides[0],
      .x_strides = walk.strides[2],
      .residual_strides = walk.strides[3],
      .eps = float(eps),
      .offset = weight.defined() ? float(offset) : 0.f,
      .flags = (weight.defined() ? flags::HAS_WEIGHT : 0) |
          (core::rounds_first(casting_mode) ? flags::ROUND_FIRST : 0) | (out.rstd.defined() ? flags::SAVE_RSTD : 0)};
  walk.pass(args);
  const auto choice = core::choose<K>(walk.n, args, point_of<K>(x, weight, residual), walk.rows);
  core::launch(op, x.device(), choice, {core::programs_for(walk.rows, choice.config.BLOCK_M)}, args);
}

std::tuple<Tensor, Tensor> Cuda::backward(
    const Tensor& dx, Tensor dy, Tensor ds, Tensor x, Tensor weight, Tensor rstd, double offset,
    std::string_view casting_mode, bool needs_dweight) {
  using K = kernels::rms_norm_bwd;
  const char* op = "rms_norm backward";
  c10::DeviceGuard guard(x.device());
  if (weight.defined()) weight = weight.contiguous();
  Tensor dweight = needs_dweight ? at::empty_like(weight) : Tensor();
  if (x.numel() == 0) return {dx, needs_dweight ? dweight.zero_() : dweight};
  // The kernel always writes dx. If dx is not needed (frozen inputs), a temporary buffer receives it.
  Tensor out = core::lead_of(dx, x);
  rstd = core::per_row(rstd, out);
  const auto walk = core::walk_rows<4>(op, {&out, &dy, &ds, &x});
  K::Args args{
      .dx = core::address(out),
      .dweight = core::address(dweight),
      .dy = core::address(dy),
      .ds = core::address(ds),
      .x = core::address(x),
      .weight = core::address(weight),
      .rstd = core::address(rstd),
      .dx_strides = walk.strides[0],
      .dy_strides = walk.strides[1],
      .ds_strides = walk.strides[2],
      .x_strides = walk.strides[3],
      .offset = weight.defined() ? float(offset) : 0.f,
      .flags = (weight.defined() ? flags::HAS_WEIGHT : 0) |
          (weight.defined() && core::rounds_first(casting_mode) ? flags::ROUND_FIRST : 0) |
          (needs_dweight ? flags::NEEDS_DWEIGHT : 0)};
  walk.pass(args);
  const auto choice = core::choose<K>(walk.n, args, point_of<K>(x, weight, ds), walk.rows);
  const int64_t blocks = core::programs_for(walk.rows, choice.config.BLOCK_M);
  core::launch_with_sums(op, x.device(), choice, blocks, args, {dweight}, flags::FINAL);
  return {dx, dweight};
}

}  // namespace liger::ops::rms_norm
