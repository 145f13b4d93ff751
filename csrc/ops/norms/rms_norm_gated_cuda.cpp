// rms_norm_gated on CUDA. Launches the kernels of liger_ops/kernels/norms/rms_norm_gated.py.

#include "kernels/rms_norm_gated.h"
#include "core/cuda/column_sum.h"
#include "ops/norms/rms_norm_gated.h"

namespace liger::ops::rms_norm_gated {
namespace {

namespace flags = kernels::constants::rms_norm_gated;

int32_t common_flags(const Options& options, const Tensor& x, const Tensor& weight) {
  return (weight.defined() ? flags::HAS_WEIGHT : 0) | (options.rounds_row() ? flags::ROUND_FIRST : 0) |
      (options.rounds_product(x, weight) ? flags::ROUND_PRODUCT : 0) | (options.gate_first ? flags::GATE_FIRST : 0) |
      (options.sigmoid ? flags::SIGMOID : 0);
}

template <class K>
auto point_of(const Tensor& x, const Tensor& weight, const Tensor& y) {
  const auto parameters = core::dtype_of(weight.defined() ? weight : x);
  return runtime::point_of<K>(K::dtype(core::dtype_of(x), parameters, core::dtype_of(y)));
}

void check_count(const char* op, int64_t rows, int64_t groups) {
  LIGER_CHECK(
      rows * groups <= std::numeric_limits<int32_t>::max(), op, "x", "have fewer than 2^31 groups of columns",
      rows * groups);
}

}  // namespace

void Cuda::forward(
    Tensor y, const Tensor& rstd, Tensor x, Tensor gate, Tensor weight, const Options& options,
    std::optional<int64_t> group_size) {
  using K = kernels::rms_norm_gated_fwd;
  c10::DeviceGuard guard(x.device());
  if (x.numel() == 0) return;
  if (weight.defined()) weight = weight.contiguous();
  const int64_t columns = group_size.value_or(x.size(-1)), groups = x.size(-1) / columns;
  const auto walk = core::walk_rows<3>(kOp, {&y, &x, &gate});
  check_count(kOp, walk.rows, groups);
  const K::Args args{
      .y = core::address(y),
      .rstd = core::address(rstd),
      .x = core::address(x),
      .gate = core::address(gate),
      .weight = core::address(weight),
      .rows = int32_t(walk.rows),
      .n = int32_t(columns),
      .groups = int32_t(groups),
      .inner_rows = walk.kernel_inner_rows(),
      .y_strides = walk.strides[0],
      .x_strides = walk.strides[1],
      .gate_strides = walk.strides[2],
      .eps = float(options.eps),
      .offset = weight.defined() ? float(options.offset) : 0.f,
      .flags = common_flags(options, x, weight) | (rstd.defined() ? flags::SAVE_RSTD : 0)};
  const auto choice = core::choose<K>(columns, args, point_of<K>(x, weight, y), walk.rows);
  const int64_t blocks = core::programs_for(walk.rows, choice.config.BLOCK_M);
  core::launch(kOp, x.device(), choice, {uint32_t(blocks * groups)}, args);
}

Gradients Cuda::backward(
    Tensor dx, Tensor dgate, Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, const Options& options,
    bool needs_dweight) {
  using K = kernels::rms_norm_gated_bwd;
  c10::DeviceGuard guard(x.device());
  if (weight.defined()) weight = weight.contiguous();
  Tensor dweight = needs_dweight ? at::empty_like(weight) : Tensor();
  if (x.numel() == 0) return {dx, dgate, needs_dweight ? dweight.zero_() : dweight};
  const int64_t groups = rstd.size(-1), columns = x.size(-1) / groups;
  Tensor lead = core::lead_of(dx.defined() ? dx : dgate, x);
  rstd = core::per_row(rstd, by_group(lead, groups, columns));
  const auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dgate, &dy, &x, &gate});
  check_count(kBackward, walk.rows, groups);
  K::Args args{
      .dx = core::address(dx),
      .dgate = core::address(dgate),
      .dweight = core::address(dweight),
      .dy = core::address(dy),
      .x = core::address(x),
      .gate = core::address(gate),
      .weight = core::address(weight),
      .rstd = core::address(rstd),
      .rows = int32_t(walk.rows),
      .n = int32_t(columns),
      .groups = int32_t(groups),
      .inner_rows = walk.kernel_inner_rows(),
      .dx_strides = walk.strides[1],
      .dgate_strides = walk.strides[2],
      .dy_strides = walk.strides[3],
      .x_strides = walk.strides[4],
      .gate_strides = walk.strides[5],
      .offset = weight.defined() ? float(options.offset) : 0.f,
      .flags = common_flags(options, x, weight) | (dx.defined() ? flags::NEEDS_DX : 0) |
          (dgate.defined() ? flags::NEEDS_DGATE : 0) | (needs_dweight ? flags::NEEDS_DWEIGHT : 0)};
  const auto choice = core::choose<K>(columns, args, point_of<K>(x, weight, dy), walk.rows);
  const int64_t blocks = core::programs_for(walk.rows, choice.config.BLOCK_M);
  core::launch_with_sums(kBackward, x.device(), choice, blocks, args, {dweight}, flags::FINAL, groups);
  return {dx, dgate, dweight};
}

}  // namespace liger::ops::rms_norm_gated
