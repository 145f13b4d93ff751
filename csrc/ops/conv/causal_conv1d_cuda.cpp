// causal_conv1d on CUDA. Launches the kernels of liger_ops/kernels/conv/causal_conv1d.py.

#include <algorithm>

#include "ops/conv/conv_cuda.h"

namespace liger::ops::causal_conv1d {
namespace {

namespace flags = kernels::constants::causal_conv1d;

/// Sets the arguments that both kernels have.
template <class Args>
void pass(const Inputs& in, Args& args) {
  const Columns& columns = in.columns;
  args.x = core::address(in.x);
  args.weight = core::address(in.weight);
  args.bias = core::address(in.bias);
  args.sample = core::address(in.samples);
  args.state = core::address(in.state);
  args.length = int32_t(in.x.size(1));
  args.groups = int32_t(columns.groups);
  args.size0 = int32_t(columns.sizes[0]);
  args.size1 = int32_t(columns.sizes[1]);
  args.size2 = int32_t(columns.sizes[2]);
  args.pitch = int32_t(columns.pitch);
  args.width = int32_t(in.width());
  args.dilation = int32_t(in.dilation);
  args.x_batch = in.x.stride(0);
  args.x_row = in.x.stride(1);
  args.flags |= (in.silu ? flags::SILU : 0) | (in.bias.defined() ? flags::HAS_BIAS : 0) |
      (in.state.defined() ? flags::HAS_STATE : 0) | (in.samples.defined() ? flags::HAS_SAMPLES : 0);
}

template <class K>
auto point_of(const Inputs& in) {
  const bool masked = in.width() != flags::NARROW_WIDTH || in.samples.defined();
  return runtime::point_of<K>(
      K::dtype(core::dtype_of(in.x), core::dtype_of(in.weight)), in.width() > flags::NARROW_WIDTH ? 2 : masked);
}

int64_t widest_part(const Columns& columns) {
  return columns.groups * *std::max_element(columns.sizes.begin(), columns.sizes.end());
}

}  // namespace

void Cuda::forward(const Inputs& in, const Parts& y) {
  using K = kernels::causal_conv1d_fwd;
  c10::DeviceGuard guard(in.x.device());
  K::Args args{.y0 = core::address(y[0]), .y1 = core::address(y[1]), .y2 = core::address(y[2])};
  pass(in, args);
  const auto choice = core::choose<K>(widest_part(in.columns), args, point_of<K>(in));
  const auto& config = choice.config;
  launch(in, choice, blocks_of(in, config.BLOCK_M * config.STEPS, config.BLOCK_N), args);
}

void Cuda::backward(const Parts& dy, const Inputs& in, const Gradients& out) {
  using K = kernels::causal_conv1d_bwd;
  c10::DeviceGuard guard(in.x.device());
  auto stride = [&](size_t part, int64_t dim) { return dy[part].defined() ? dy[part].stride(dim) : 0; };
  K::Args args{
      .dx = core::address(out.dx),
      .dstate = core::address(out.dstate),
      .dy0 = core::address(dy[0]),
      .dy1 = core::address(dy[1]),
      .dy2 = core::address(dy[2]),
      .dy_batch0 = stride(0, 0),
      .dy_batch1 = stride(1, 0),
      .dy_batch2 = stride(2, 0),
      .dy_row0 = stride(0, 1),
      .dy_row1 = stride(1, 1),
      .dy_row2 = stride(2, 1),
      .flags = (out.dx.defined() ? flags::NEEDS_DX : 0) | (out.dweight.defined() ? flags::NEEDS_DWEIGHT : 0) |
          (out.dbias.defined() ? flags::NEEDS_DBIAS : 0) | (out.dstate.defined() ? flags::NEEDS_DSTATE : 0)};
  pass(in, args);
  const auto choice = core::choose<K>(widest_part(in.columns), args, point_of<K>(in));
  const auto& config = choice.config;
  launch_backward(in, out, choice, blocks_of(in, config.BLOCK_M * config.STEPS, config.BLOCK_N), args);
}

}  // namespace liger::ops::causal_conv1d
