#pragma once

// Rows of tensors in their logical order, like labels and ids.

#include "core/rows.h"

namespace liger::ops {

/// Tensors that two levels of strides cannot describe are replaced by copies. name: of an argument in messages.
template <size_t N>
core::Rows<N> rows_in_order(const char* op, const char* name, const std::array<at::Tensor*, N>& tensors) {
  core::Rows<N> out;
  const int64_t n = tensors[0]->size(-1), elements = tensors[0]->numel();
  bool unit = true;
  for (at::Tensor* t : tensors) unit = unit && (t->stride(-1) == 1 || n == 1);
  if (!unit || !core::detail::merge_levels<N>(tensors, out)) {
    for (at::Tensor* t : tensors) *t = t->contiguous();
    core::detail::merge_levels<N>(tensors, out);
  }
  out.n = n;
  out.rows = n ? elements / n : 0;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  LIGER_CHECK(
      out.rows <= kMost && n <= kMost, op, name, "have fewer than 2^31 rows and columns", out.rows, " rows of ", n);
  return out;
}

}  // namespace liger::ops
