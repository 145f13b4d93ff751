// What liger_ops/projections.py cannot say to torch.compile, which would copy the sum ahead of every product.

#include <ATen/ATen.h>
#include <torch/library.h>

#include "core/checks.h"

namespace liger::ops {
namespace {

constexpr const char* kOp = "_projections_grad";

// grads: (rows, out) each, weights: (out, n) -> their products' sum, which every product but the first is added to.
at::Tensor projections_grad(at::TensorList grads, at::TensorList weights) {
  LIGER_CHECK(
      !grads.empty() && grads.size() == weights.size(), kOp, "weights", "be as many as gradients, and at least one",
      weights.size(), " beside ", grads.size());
  at::Tensor sum = at::mm(grads[0], weights[0]);
  for (size_t i = 1; i < grads.size(); ++i) sum.addmm_(grads[i], weights[i]);
  return sum;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("_projections_grad(Tensor[] grads, Tensor[] weights) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(liger, CompositeExplicitAutograd, m) { m.impl("_projections_grad", projections_grad); }

}  // namespace liger::ops
