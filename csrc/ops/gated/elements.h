#pragma once

// Tensors that go element by element with each other, as rows.

#include "core/rows.h"

namespace liger::ops::gated {

using namespace core;

// Memory of one layout is one long row, whatever its shape; otherwise rows. tensors[0] leads, as in walk_rows.
template <size_t N>
Rows<N> walk_elements(const char* op, const std::array<at::Tensor*, N>& tensors) {
  const at::Tensor& lead = *tensors[0];
  bool alike = lead.is_non_overlapping_and_dense();
  for (at::Tensor* t : tensors) alike = alike && detail::same_strides(lead, *t);
  if (!alike) return walk_rows<N>(op, tensors);
  Rows<N> out;
  out.rows = 1;
  out.n = lead.numel();
  return out;
}

}  // namespace liger::ops::gated
