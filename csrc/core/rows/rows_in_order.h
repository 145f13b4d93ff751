#pragma once

// Rows of tensors in their logical order, like labels and ids, and the columns that kernels read of them.

#include "core/rows/rows.h"

namespace liger::core {

/// Tensors that two levels of strides cannot describe are replaced by copies. name: of an argument in messages.
template <size_t N>
core::Rows<N> rows_in_order(const char* op, const char* name, const std::array<at::Tensor*, N>& tensors) {
  core::Rows<N> out;
  const auto sizes = tensors[0]->sizes();
  out.n = sizes.back();
  out.rows = c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      out.rows <= kMost && out.n <= kMost, op, name, "have fewer than 2^31 rows and columns", out.rows, " rows of ",
      out.n);
  bool unit = true;
  for (at::Tensor* t : tensors) unit = unit && (t->stride(-1) == 1 || out.n == 1);
  if (!unit || !core::detail::merge_levels<N>(tensors, out)) {
    for (at::Tensor* t : tensors) *t = t->contiguous();
    core::detail::merge_levels<N>(tensors, out);
  }
  return out;
}

/// Upper bound of the end of a row of n columns, whatever its skew.
template <class Config>
int64_t columns_end(const Config& config, int64_t n, int64_t most_skew) {
  return n + (config.SKEWED ? most_skew : 0);
}

}  // namespace liger::core
