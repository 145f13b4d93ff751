// short_conv on CUDA. Launches the kernels of liger_ops/kernels/conv/short_conv.py.

#include "core/column_sum.h"
#include "core/cuda.h"
#include "kernels/short_conv.h"
#include "ops/conv/short_conv.h"

namespace liger::ops::short_conv {
namespace {

namespace flags = kernels::constants::short_conv;
static_assert(flags::MAX_WIDTH == causal_conv1d::kMaxWidth);

bool wide_weight(const Inputs& in) { return in.weight.scalar_type() != in.bcx.scalar_type(); }

int32_t common_flags(const Inputs& in) {
  return (in.bias.defined() ? flags::HAS_BIAS : 0) | (wide_weight(in) ? flags::WIDE_WEIGHT : 0) |
      (in.samples.defined() ? flags::HAS_SAMPLES : 0);
}

/// A parameter's address as the kernel gets it: in the dtype of the rows, or in fp32.
const void* narrow_address(const Inputs& in, const Tensor& t) { return wide_weight(in) ? nullptr : core::address(t); }
const void* wide_address(const Inputs& in, const Tensor& t) { return wide_weight(in) ? core::address(t) : nullptr; }

template <class K>
auto point_of(const Inputs& in) {
  const bool exact = in.width() == flags::EXACT_WIDTH && !in.samples.defined();
  return runtime::point_of<K>(K::dtype(core::dtype_of(in.bcx)), in.width() > flags::NARROW_WIDTH ? 2 : exact ? 0 : 1);
}

struct Blocks {
  int64_t chunks, shares, programs;
};

/// Programs walk over chunks of the rows of every batch, and over blocks of channels.
template <class Config>
Blocks blocks_of(const Inputs& in, const Config& config) {
  const int64_t batches = in.bcx.size(0), length = in.bcx.size(1), columns = in.channels();
  const int64_t chunks = (length + config.STEPS - 1) / config.STEPS, shares = chunks * batches;
  const int64_t programs = shares * ((columns + config.BLOCK_N - 1) / config.BLOCK_N);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      programs <= kMax && length + 2 * config.STEPS <= kMax && 3 * columns + config.BLOCK_N <= kMax, in.op, "bcx",
      "have fewer than 2^31 rows in a batch, columns, and tiles", in.bcx.sizes());
  return {chunks, shares, programs};
}

}  // namespace

void Cuda::forward(const Inputs& in, const Tensor& y) {
  using K = kernels::short_conv_fwd;
  c10::DeviceGuard guard(in.bcx.device());
  const auto point = point_of<K>(in);
  const bool aligned = ((in.channels() | in.bcx.stride(0) | in.bcx.stride(1)) & 7) == 0 &&
      core::aligned16(core::address(y), core::address(in.bcx));
  const auto& config = runtime::first_fit<K>(in.channels(), aligned, point);
  const auto blocks = blocks_of(in, config);
  K::Args args{
      core::address(y),
      core::address(in.bcx),
      narrow_address(in, in.weight),
      wide_address(in, in.weight),
      narrow_address(in, in.bias),
      wide_address(in, in.bias),
      core::address(in.samples),
      int32_t(in.bcx.size(1)),
      int32_t(in.channels()),
      int32_t(in.width()),
      int32_t(blocks.chunks),
      in.bcx.stride(0),
      in.bcx.stride(1),
      common_flags(in)};
  core::launch<K>(in.op, in.bcx.device(), runtime::variant_index<K>(config, point), {uint32_t(blocks.programs)}, args);
}

void Cuda::backward(const Tensor& dy, const Inputs& in, const Gradients& out) {
  using K = kernels::short_conv_bwd;
  c10::DeviceGuard guard(in.bcx.device());
  const auto point = point_of<K>(in);
  const int64_t strides = dy.stride(0) | dy.stride(1) | in.bcx.stride(0) | in.bcx.stride(1);
  const bool aligned = ((in.channels() | strides) & 7) == 0 &&
      core::aligned16(core::address(out.dbcx), core::address(dy), core::address(in.bcx));
  const auto& config = runtime::first_fit<K>(in.channels(), aligned, point);
  const auto blocks = blocks_of(in, config);
  const at::TensorOptions sums = in.bcx.options().dtype(at::kFloat);
  auto partial = [&](const Tensor& total) {
    return total.defined() ? at::empty({1, blocks.shares, total.numel()}, sums) : Tensor();
  };
  const Tensor dweight = partial(out.dweight), dbias = partial(out.dbias);
  K::Args args{
      core::address(out.dbcx),
      core::address(dweight),
      core::address(dbias),
      core::address(dy),
      core::address(in.bcx),
      narrow_address(in, in.weight),
      wide_address(in, in.weight),
      narrow_address(in, in.bias),
      wide_address(in, in.bias),
      core::address(in.samples),
      int32_t(in.bcx.size(1)),
      int32_t(in.channels()),
      int32_t(in.width()),
      int32_t(blocks.chunks),
      dy.stride(0),
      dy.stride(1),
      in.bcx.stride(0),
      in.bcx.stride(1),
      common_flags(in) | (out.dbcx.defined() ? flags::NEEDS_DX : 0) | (dweight.defined() ? flags::NEEDS_DWEIGHT : 0) |
          (dbias.defined() ? flags::NEEDS_DBIAS : 0)};
  core::launch<K>(in.op, in.bcx.device(), runtime::variant_index<K>(config, point), {uint32_t(blocks.programs)}, args);
  if (dweight.defined()) core::column_sum(in.op, dweight, out.dweight);
  if (dbias.defined()) core::column_sum(in.op, dbias, out.dbias);
}

}  // namespace liger::ops::short_conv
