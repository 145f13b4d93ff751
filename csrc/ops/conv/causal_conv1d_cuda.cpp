// causal_conv1d on CUDA. Launches the kernels of liger_ops/kernels/conv/causal_conv1d.py.

#include <algorithm>

#include "core/column_sum.h"
#include "core/cuda.h"
#include "kernels/causal_conv1d.h"
#include "ops/conv/causal_conv1d.h"

namespace liger::ops::causal_conv1d {
namespace {

namespace flags = kernels::constants::causal_conv1d;

int32_t common_flags(const Inputs& in) {
  return (in.silu ? flags::SILU : 0) | (in.bias.defined() ? flags::HAS_BIAS : 0) |
      (in.state.defined() ? flags::HAS_STATE : 0) | (in.samples.defined() ? flags::HAS_SAMPLES : 0);
}

template <class K>
auto point_of(const Inputs& in) {
  const bool masked = in.width() != flags::NARROW_WIDTH || in.samples.defined();
  return runtime::point_of<K>(
      K::dtype(core::dtype_of(in.x), core::dtype_of(in.weight)), in.width() > flags::NARROW_WIDTH ? 2 : masked);
}

struct Blocks {
  int64_t chunks, shares, programs;
};

/// Programs walk over `dilation` sequences of every batch, in chunks, and over blocks of the columns of each part.
template <class Config>
Blocks blocks_of(const Inputs& in, const Config& config) {
  const int64_t length = in.x.size(1), columns = in.x.size(2);
  const int64_t steps = (length + in.dilation - 1) / in.dilation, rows = config.BLOCK_M * config.STEPS;
  const int64_t chunks = std::max<int64_t>(1, (steps + rows - 1) / rows);
  const int64_t shares = chunks * in.dilation * in.x.size(0);
  int64_t programs = 0;
  for (size_t i = 0; i < kParts; ++i) {
    programs += shares * ((in.columns.part(i) + config.BLOCK_N - 1) / config.BLOCK_N);
  }
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      programs <= kMax && length + in.past() + rows * in.dilation <= kMax && columns <= kMax, in.op, "x",
      "have fewer than 2^31 rows in a batch, columns, and tiles", in.x.sizes());
  return {chunks, shares, programs};
}

int64_t widest_part(const Columns& columns) {
  return columns.groups * *std::max_element(columns.sizes.begin(), columns.sizes.end());
}

/// The bits of all numbers of columns.
int64_t sizes_of(const Columns& columns) {
  return columns.pitch | columns.sizes[0] | columns.sizes[1] | columns.sizes[2];
}

}  // namespace

void Cuda::forward(const Inputs& in, const Parts& y) {
  using K = kernels::causal_conv1d_fwd;
  c10::DeviceGuard guard(in.x.device());
  const Columns& columns = in.columns;
  const bool aligned = ((sizes_of(columns) | in.x.stride(0) | in.x.stride(1)) & 7) == 0 &&
      core::aligned16(core::address(y[0]), core::address(y[1]), core::address(y[2]), core::address(in.x),
                      core::address(in.state));
  const auto point = point_of<K>(in);
  const auto& config = runtime::first_fit<K>(widest_part(columns), aligned, point);
  const auto blocks = blocks_of(in, config);
  const auto& [size0, size1, size2] = columns.sizes;
  K::Args args{
      core::address(y[0]),
      core::address(y[1]),
      core::address(y[2]),
      core::address(in.x),
      core::address(in.weight),
      core::address(in.bias),
      core::address(in.samples),
      core::address(in.state),
      int32_t(in.x.size(1)),
      int32_t(columns.groups),
      int32_t(size0),
      int32_t(size1),
      int32_t(size2),
      int32_t(columns.pitch),
      int32_t(in.width()),
      int32_t(in.dilation),
      int32_t(blocks.chunks),
      in.x.stride(0),
      in.x.stride(1),
      common_flags(in)};
  core::launch<K>(in.op, in.x.device(), runtime::variant_index<K>(config, point), {uint32_t(blocks.programs)}, args);
}

void Cuda::backward(const Parts& dy, const Inputs& in, const Gradients& out) {
  using K = kernels::causal_conv1d_bwd;
  c10::DeviceGuard guard(in.x.device());
  const Columns& columns = in.columns;
  auto stride = [&](size_t part, int64_t dim) { return dy[part].defined() ? dy[part].stride(dim) : 0; };
  int64_t strides = sizes_of(columns) | in.x.stride(0) | in.x.stride(1);
  for (size_t i = 0; i < kParts; ++i) strides |= stride(i, 0) | stride(i, 1);
  const bool aligned = (strides & 7) == 0 &&
      core::aligned16(core::address(out.dx), core::address(out.dstate), core::address(dy[0]), core::address(dy[1]),
                      core::address(dy[2]), core::address(in.x), core::address(in.state));
  const auto point = point_of<K>(in);
  const auto& config = runtime::first_fit<K>(widest_part(columns), aligned, point);
  const auto blocks = blocks_of(in, config);
  const at::TensorOptions sums = in.x.options().dtype(at::kFloat);
  const Tensor dweight =
      out.dweight.defined() ? at::empty({1, blocks.shares, in.channels() * in.width()}, sums) : Tensor();
  const Tensor dbias = out.dbias.defined() ? at::empty({1, blocks.shares, in.channels()}, sums) : Tensor();
  const auto& [size0, size1, size2] = columns.sizes;
  K::Args args{
      core::address(out.dx),
      core::address(out.dstate),
      core::address(dweight),
      core::address(dbias),
      core::address(dy[0]),
      core::address(dy[1]),
      core::address(dy[2]),
      core::address(in.x),
      core::address(in.weight),
      core::address(in.bias),
      core::address(in.samples),
      core::address(in.state),
      int32_t(in.x.size(1)),
      int32_t(columns.groups),
      int32_t(size0),
      int32_t(size1),
      int32_t(size2),
      int32_t(columns.pitch),
      int32_t(in.width()),
      int32_t(in.dilation),
      int32_t(blocks.chunks),
      stride(0, 0),
      stride(1, 0),
      stride(2, 0),
      stride(0, 1),
      stride(1, 1),
      stride(2, 1),
      in.x.stride(0),
      in.x.stride(1),
      common_flags(in) | (out.dx.defined() ? flags::NEEDS_DX : 0) | (dweight.defined() ? flags::NEEDS_DWEIGHT : 0) |
          (dbias.defined() ? flags::NEEDS_DBIAS : 0) | (out.dstate.defined() ? flags::NEEDS_DSTATE : 0)};
  core::launch<K>(in.op, in.x.device(), runtime::variant_index<K>(config, point), {uint32_t(blocks.programs)}, args);
  if (dweight.defined()) core::column_sum(in.op, dweight, out.dweight);
  if (dbias.defined()) core::column_sum(in.op, dbias, out.dbias);
}

}  // namespace liger::ops::causal_conv1d
