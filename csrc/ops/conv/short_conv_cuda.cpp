// short_conv on CUDA. Launches the kernels of liger_ops/kernels/conv/short_conv.py.

#include "kernels/short_conv.h"
#include "ops/conv/conv_cuda.h"
#include "ops/conv/short_conv.h"

namespace liger::ops::short_conv {
namespace {

namespace flags = kernels::constants::short_conv;
static_assert(flags::MAX_WIDTH == kMaxWidth);

/// Sets the arguments that both kernels have.
template <class Args>
void pass(const Inputs& in, Args& args) {
  core::pass_parameter(args.weight, args.wide_weight, in.weight, in.x);
  core::pass_parameter(args.bias, args.wide_bias, in.bias, in.x);
  args.bcx = core::address(in.x);
  args.sample = core::address(in.samples);
  args.length = int32_t(in.x.size(1));
  args.columns = int32_t(in.channels());
  args.width = int32_t(in.width());
  args.bcx_batch = in.x.stride(0);
  args.bcx_row = in.x.stride(1);
  args.flags |= (in.bias.defined() ? flags::HAS_BIAS : 0) | (in.samples.defined() ? flags::HAS_SAMPLES : 0);
}

template <class K>
auto point_of(const Inputs& in) {
  const bool exact = in.width() == flags::EXACT_WIDTH && !in.samples.defined();
  return runtime::point_of<K>(K::dtype(core::dtype_of(in.x)), in.width() > flags::NARROW_WIDTH ? 2 : exact ? 0 : 1);
}

}  // namespace

void Cuda::forward(const Inputs& in, const Tensor& y) {
  using K = kernels::short_conv_fwd;
  c10::DeviceGuard guard(in.x.device());
  K::Args args{.y = core::address(y)};
  pass(in, args);
  const auto choice = core::choose<K>(in.channels(), args, point_of<K>(in));
  launch(in, choice, blocks_of(in, choice.config.STEPS, choice.config.BLOCK_N), args);
}

void Cuda::backward(const Tensor& dy, const Inputs& in, const Gradients& out) {
  using K = kernels::short_conv_bwd;
  c10::DeviceGuard guard(in.x.device());
  K::Args args{
      .dbcx = core::address(out.dx),
      .dy = core::address(dy),
      .dy_batch = dy.stride(0),
      .dy_row = dy.stride(1),
      .flags = (out.dx.defined() ? flags::NEEDS_DX : 0) | (out.dweight.defined() ? flags::NEEDS_DWEIGHT : 0) |
          (out.dbias.defined() ? flags::NEEDS_DBIAS : 0)};
  pass(in, args);
  const auto choice = core::choose<K>(in.channels(), args, point_of<K>(in));
  launch_backward(in, out, choice, blocks_of(in, choice.config.STEPS, choice.config.BLOCK_N), args);
}

}  // namespace liger::ops::short_conv
