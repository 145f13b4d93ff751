#pragma once

#include "core/cuda/launch.h"
#include "kernels/column_sum.h"

namespace liger::core {

/// Sums fp32 partials over their rows into one or two vectors, in a fixed order.
/// partial: (outputs, rows, n); outs: (n,). Of two, one may be undefined, and its partials are not read.
inline void column_sum(const char* op, const at::Tensor& partial, const at::Tensor& out0, const at::Tensor& out1 = {}) {
  if (!out0.defined()) return column_sum(op, partial.slice(0, 1), out1);
  if (!out1.defined() && partial.size(0) > 1) return column_sum(op, partial.slice(0, 0, 1), out0);
  using K = kernels::column_sum;
  const int64_t n = partial.size(2);
  const K::Args args{
      .out0 = address(out0),
      .out1 = address(out1),
      .partial = address(partial),
      .rows = int32_t(partial.size(1)),
      .n = int32_t(n)};
  const auto choice = choose<K>(n, args, runtime::point_of<K>(K::dtype(dtype_of(out0))));
  launch(op, out0.device(), choice, {programs_for(n, choice.config.BLOCK_N), uint32_t(partial.size(0))}, args);
}

}  // namespace liger::core
