#pragma once

// liger::_mm for backward nodes. torch.compile keeps it as one call in its graph.

#include "core/autograd.h"

namespace liger::gemm {

inline at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_cuda() || !at::isReducedFloatingType(a.scalar_type())) return at::mm(a, b);
  static const auto op = core::find_op<at::Tensor(const at::Tensor&, const at::Tensor&)>("_mm");
  return op.call(a, b);
}

}  // namespace liger::gemm
