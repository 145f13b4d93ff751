#pragma once

// Launches, shared by causal_conv1d and short_conv.

#include "core/cuda/column_sum.h"
#include "core/cuda/launch.h"
#include "ops/conv/causal_conv1d.h"

namespace liger::ops::causal_conv1d {

/// Of the work: chunks of a sequence, shares of the rows of all, and programs, each for a share and a block of columns.
struct Blocks {
  int64_t chunks, shares, programs;
};

/// Programs walk over `dilation` sequences of every batch, in chunks of `rows` rows, and over blocks of the columns of
/// each part.
inline Blocks blocks_of(const Inputs& in, int64_t rows, int64_t block_n) {
  const int64_t length = in.x.size(1), columns = in.x.size(2);
  const int64_t steps = (length + in.dilation - 1) / in.dilation, chunks = (steps + rows - 1) / rows;
  const int64_t shares = chunks * in.dilation * in.x.size(0);
  int64_t programs = 0;
  for (size_t i = 0; i < kParts; ++i) programs += shares * ((in.columns.part(i) + block_n - 1) / block_n);
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      programs <= kMax && length + in.past() + rows * in.dilation + rows <= kMax && columns + block_n <= kMax, in.op,
      in.name, "have fewer than 2^31 rows in a batch, columns, and tiles", in.x.sizes());
  return {chunks, shares, programs};
}

template <class K>
void launch(const Inputs& in, const core::Choice<K>& choice, const Blocks& blocks, typename K::Args& args) {
  args.chunks = int32_t(blocks.chunks);
  core::launch(in.op, in.x.device(), choice, {uint32_t(blocks.programs)}, args);
}

/// Also adds up the gradients of the weight and the bias, of which every share has its own sums.
template <class K>
void launch_backward(
    const Inputs& in, const Gradients& out, const core::Choice<K>& choice, const Blocks& blocks,
    typename K::Args& args) {
  auto partial = [&](const Tensor& total) {
    const auto sums = in.x.options().dtype(at::kFloat);
    return total.defined() ? at::empty({1, blocks.shares, total.numel()}, sums) : Tensor();
  };
  const Tensor dweight = partial(out.dweight), dbias = partial(out.dbias);
  args.dweight = core::address(dweight);
  args.dbias = core::address(dbias);
  launch(in, choice, blocks, args);
  if (dweight.defined()) core::column_sum(in.op, dweight, out.dweight);
  if (dbias.defined()) core::column_sum(in.op, dbias, out.dbias);
}

}  // namespace liger::ops::causal_conv1d
