// layer_norm on CUDA. Launches the kernels of liger_ops/kernels/norms/layer_norm.py.

#include "core/column_sum.h"
#include "core/cuda.h"
#include "kernels/layer_norm.h"
#include "ops/norms/layer_norm.h"

namespace liger::ops::layer_norm {

namespace flags = kernels::constants::layer_norm;

Forward Cuda::forward(
    const Tensor& x_in, const OptionalTensor& weight_in, const OptionalTensor& bias_in, double eps, bool save) {
  using K = kernels::layer_norm_fwd;
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
  int32_t flags = (weight.defined() ? flags::HAS_WEIGHT : 0) | (bias.defined() ? flags::HAS_BIAS : 0) |
      (save ? flags::SAVE_STATISTICS : 0);
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

Gradients Cuda::backward(
    const Tensor& dy_in, const Tensor& x_in, const OptionalTensor& weight_in, const Tensor& statistics_in,
    const Tensor& dx, bool needs_dweight, bool needs_dbias, at::ScalarType parameters) {
  Tensor dy = dy_in, x = x_in;
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
  // The kernel always writes dx. If dx is not needed (frozen inputs), a temporary buffer receives it.
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
  int32_t flags = (weight.defined() ? flags::HAS_WEIGHT : 0) | (needs_dweight ? flags::NEEDS_DWEIGHT : 0) |
      (needs_dbias ? flags::NEEDS_DBIAS : 0) | (final ? flags::FINAL : 0);
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

}  // namespace liger::ops::layer_norm
