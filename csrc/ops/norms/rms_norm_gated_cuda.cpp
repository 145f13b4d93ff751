// rms_norm_gated on CUDA. Launches the kernels of liger_ops/kernels/norms/rms_norm_gated.py.

#include "core/column_sum.h"
#include "core/cuda.h"
#include "core/rows.h"
#include "kernels/rms_norm_gated.h"
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
  const auto weight_type = weight.defined() ? weight.scalar_type() : x.scalar_type();
  return runtime::point_of<K>(K::dtype(core::dtype_of(x), core::dtype_of(weight_type), core::dtype_of(y)));
}

void check_count(const char* op, int64_t rows, int64_t groups) {
  LIGER_CHECK(
      rows * groups <= std::numeric_limits<int32_t>::max(), op, "x", "have fewer than 2^31 groups of columns",
      rows * groups);
}

}  // namespace

Forward Cuda::forward(
    const Tensor& x_in, const Tensor& gate_in, const Tensor& weight_in, const Options& options,
    const c10::SymInt& groups_in, const c10::SymInt& columns_in, bool save_rstd) {
  using K = kernels::rms_norm_gated_fwd;
  c10::DeviceGuard guard(x_in.device());
  Tensor x = x_in, gate = gate_in, weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  Forward out = allocate(x, weight, options, groups_in, columns_in, save_rstd);
  if (x.numel() == 0) return out;
  const int64_t groups = groups_in.expect_int(), columns = columns_in.expect_int();
  auto walk = core::walk_rows<3>(kOp, {&out.y, &x, &gate});
  check_count(kOp, walk.rows, groups);
  const bool aligned = walk.aligned_strides() && columns % 8 == 0 &&
      core::aligned16(core::address(out.y), core::address(x), core::address(gate), core::address(weight));
  const auto point = point_of<K>(x, weight, out.y);
  const auto& config = runtime::first_fit<K>(columns, aligned, point, walk.rows);
  const auto& [y_walk, x_walk, gate_walk] = walk.strides;
  K::Args args{
      core::address(out.y),
      core::address(out.rstd),
      core::address(x),
      core::address(gate),
      core::address(weight),
      int32_t(walk.rows),
      int32_t(columns),
      int32_t(groups),
      walk.kernel_inner_rows(),
      y_walk.outer,
      y_walk.inner,
      x_walk.outer,
      x_walk.inner,
      gate_walk.outer,
      gate_walk.inner,
      float(options.eps),
      weight.defined() ? float(options.offset) : 0.f,
      common_flags(options, x, weight) | (save_rstd ? flags::SAVE_RSTD : 0)};
  const int64_t blocks = (walk.rows + config.BLOCK_M - 1) / config.BLOCK_M;
  core::launch<K>(kOp, x.device(), runtime::variant_index<K>(config, point), {uint32_t(blocks * groups)}, args);
  return out;
}

Gradients Cuda::backward(
    const Tensor& dy_in, const Tensor& x_in, const Tensor& gate_in, const Tensor& weight_in, const Tensor& rstd_in,
    const Options& options, const Tensor& dx_in, const Tensor& dgate_in, bool needs_dweight) {
  using K = kernels::rms_norm_gated_bwd;
  Tensor dy = dy_in, x = x_in, gate = gate_in, dx = dx_in, dgate = dgate_in;
  c10::DeviceGuard guard(x.device());
  Tensor weight = weight_in.defined() ? weight_in.contiguous() : weight_in;
  Tensor dweight = needs_dweight ? at::empty_like(weight) : Tensor();
  if (x.numel() == 0) return {dx, dgate, needs_dweight ? dweight.zero_() : dweight};
  const int64_t groups = rstd_in.size(-1), columns = x.size(-1) / groups;
  Tensor lead = dx.defined() ? dx : dgate.defined() ? dgate : core::empty_rows_like(x);
  Tensor rstd = core::per_row(rstd_in, by_group(lead, groups, columns));
  auto walk = core::walk_rows<6>(kBackward, {&lead, &dx, &dgate, &dy, &x, &gate});
  check_count(kBackward, walk.rows, groups);
  const bool aligned = walk.aligned_strides() && columns % 8 == 0 &&
      core::aligned16(
                           core::address(dx), core::address(dgate), core::address(dy), core::address(x),
                           core::address(gate), core::address(weight));
  const auto point = point_of<K>(x, weight, dy);
  const auto& config = runtime::first_fit<K>(columns, aligned, point, walk.rows);
  const int64_t blocks = (walk.rows + config.BLOCK_M - 1) / config.BLOCK_M;
  const int64_t resident = core::persistent_programs(x.device(), blocks * groups, config.programs_per_sm);
  const int64_t programs = std::max<int64_t>(1, std::min(blocks, resident / groups));  // of each group
  const bool final = blocks == 1, adds_up = needs_dweight && !final;
  Tensor partial = adds_up ? at::empty({1, programs, walk.n}, x.options().dtype(at::kFloat)) : Tensor();
  const auto& [lead_walk, dx_walk, dgate_walk, dy_walk, x_walk, gate_walk] = walk.strides;
  K::Args args{
      core::address(dx),
      core::address(dgate),
      core::address(dweight),
      core::address(partial),
      core::address(dy),
      core::address(x),
      core::address(gate),
      core::address(weight),
      core::address(rstd),
      int32_t(walk.rows),
      int32_t(columns),
      int32_t(groups),
      walk.kernel_inner_rows(),
      dx_walk.outer,
      dx_walk.inner,
      dgate_walk.outer,
      dgate_walk.inner,
      dy_walk.outer,
      dy_walk.inner,
      x_walk.outer,
      x_walk.inner,
      gate_walk.outer,
      gate_walk.inner,
      weight.defined() ? float(options.offset) : 0.f,
      common_flags(options, x, weight) | (dx.defined() ? flags::NEEDS_DX : 0) |
          (dgate.defined() ? flags::NEEDS_DGATE : 0) | (needs_dweight ? flags::NEEDS_DWEIGHT : 0) |
          (final ? flags::FINAL : 0)};
  core::launch<K>(
      kBackward, x.device(), runtime::variant_index<K>(config, point), {uint32_t(programs * groups)}, args);
  if (adds_up) core::column_sum(kBackward, partial, dweight);
  return {dx, dgate, dweight};
}

}  // namespace liger::ops::rms_norm_gated
