// layer_norm on CUDA. Launches the kernels of liger_ops/kernels/norms/layer_norm.py.

#include "kernels/layer_norm.h"
#include "ops/norms/layer_norm.h"
#include "core/cuda/column_sum.h"

namespace liger::ops::layer_norm {

namespace flags = kernels::constants::layer_norm;

void Cuda::forward(
    Tensor y, const Tensor& statistics, Tensor x, const OptionalTensor& weight_in, const OptionalTensor& bias_in,
    double eps) {
  using K = kernels::layer_norm_fwd;
  c10::DeviceGuard guard(x.device());
  if (x.numel() == 0) return;
  const Tensor weight = contiguous_or_undefined(weight_in), bias = contiguous_or_undefined(bias_in);
  const auto walk = core::walk_rows<2>(kOp, {&y, &x});
  K::Args args{
      .y = core::address(y),
      .statistics = core::address(statistics),
      .x = core::address(x),
      .weight = core::address(weight),
      .bias = core::address(bias),
      .y_strides = walk.strides[0],
      .x_strides = walk.strides[1],
      .eps = float(eps),
      .flags = (weight.defined() ? flags::HAS_WEIGHT : 0) | (bias.defined() ? flags::HAS_BIAS : 0) |
          (statistics.defined() ? flags::SAVE_STATISTICS : 0)};
  walk.pass(args);
  const auto parameters = core::dtype_of(parameter_type(x, weight, bias));
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), parameters));
  const auto choice = core::choose<K>(walk.n, args, point, walk.rows);
  core::launch(kOp, x.device(), choice, {core::programs_for(walk.rows, choice.config.BLOCK_M)}, args);
}

Gradients Cuda::backward(
    const Tensor& dx, Tensor dy, Tensor x, const OptionalTensor& weight_in, const Tensor& statistics_in,
    bool needs_dweight, bool needs_dbias, at::ScalarType parameters) {
  using K = kernels::layer_norm_bwd;
  const char* op = "layer_norm backward";
  c10::DeviceGuard guard(x.device());
  const Tensor weight = contiguous_or_undefined(weight_in);
  const Tensor dweight = empty_parameter(x, parameters, needs_dweight);
  const Tensor dbias = empty_parameter(x, parameters, needs_dbias);
  if (x.numel() == 0) {
    for (const Tensor& t : {dweight, dbias}) {
      if (t.defined()) t.zero_();
    }
    return {dx, dweight, dbias};
  }
  // The kernel always writes dx. If dx is not needed (frozen inputs), a temporary buffer receives it.
  Tensor written = core::lead_of(dx, x), statistics = core::per_row(statistics_in, written);
  const auto walk = core::walk_rows<3>(op, {&written, &dy, &x});
  K::Args args{
      .dx = core::address(written),
      .dweight = core::address(dweight),
      .dbias = core::address(dbias),
      .dy = core::address(dy),
      .x = core::address(x),
      .weight = core::address(weight),
      .statistics = core::address(statistics),
      .dx_strides = walk.strides[0],
      .dy_strides = walk.strides[1],
      .x_strides = walk.strides[2],
      .flags = (weight.defined() ? flags::HAS_WEIGHT : 0) | (needs_dweight ? flags::NEEDS_DWEIGHT : 0) |
          (needs_dbias ? flags::NEEDS_DBIAS : 0)};
  walk.pass(args);
  const auto point = runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(parameters)));
  const auto choice = core::choose<K>(walk.n, args, point, walk.rows);
  const int64_t blocks = core::programs_for(walk.rows, choice.config.BLOCK_M);
  core::launch_with_sums(op, x.device(), choice, blocks, args, {dweight, dbias}, flags::FINAL);
  return {dx, dweight, dbias};
}

}  // namespace liger::ops::layer_norm
