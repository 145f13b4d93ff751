#pragma once

#include "core/cuda.h"
#include "kernels/column_sum.h"

namespace liger::core {

/// Sums fp32 partials over their rows into one or two vectors, in a fixed order.
/// partial: (outputs, rows, n); outs: (n,), the second may be undefined.
inline void column_sum(const char* op, const at::Tensor& partial, const at::Tensor& out0, const at::Tensor& out1 = {}) {
  using K = kernels::column_sum;
  int64_t rows = partial.size(1), n = partial.size(2);
  bool aligned = aligned16(address(out0), address(out1), address(partial)) && n % 8 == 0;
  const auto& config = runtime::first_fit<K>(n, aligned);
  K::Args args{address(out0), address(out1), address(partial), int32_t(rows), int32_t(n)};
  runtime::Grid grid{uint32_t((n + config.BLOCK_N - 1) / config.BLOCK_N), uint32_t(partial.size(0))};
  const auto point = runtime::point_of<K>(K::dtype(dtype_of(out0)));
  launch<K>(op, out0.device(), runtime::variant_index<K>(config, point), grid, args);
}

}  // namespace liger::core
