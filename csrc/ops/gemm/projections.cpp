// The input gradient of liger_ops/projections.py as one operator. Otherwise torch.compile would copy the sum before
// every GEMM.

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "core/aten.h"
#include "core/checks.h"
#include "core/memory.h"
#include "core/registration.h"
#include "gemm/multiply.h"

namespace liger::ops::projections {
namespace {

constexpr const char* kOp = "_projections_grad";

void check(at::TensorList grads, at::TensorList weights) {
  LIGER_CHECK(
      !grads.empty() && grads.size() == weights.size(), kOp, "grads and weights", "have equal, non-zero length",
      grads.size(), " and ", weights.size());
}

// grads: (rows, out) each, weights: (out, n) -> (rows, n), the sum of grad @ weight, accumulated in the GEMMs.
at::Tensor projections_grad(at::TensorList grads, at::TensorList weights) {
  check(grads, weights);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor sum = at::mm(grads[0], weights[0]);
  for (size_t i = 1; i < grads.size(); ++i) sum.addmm_(grads[i], weights[i]);
  return sum;
}

at::Tensor projections_grad_cuda(at::TensorList grads, at::TensorList weights) {
  check(grads, weights);
  c10::DeviceGuard guard(grads[0].device());
  at::Tensor sum = at::empty({grads[0].size(0), weights[0].size(1)}, grads[0].options());
  for (size_t i = 0; i < grads.size(); ++i) gemm::multiply(sum, grads[i], weights[i], i > 0, 1, /*sustained=*/true);
  return sum;
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) { core::define(m, "_projections_grad(Tensor[] grads, Tensor[] weights) -> Tensor"); }

LIGER_LIBRARY_IMPL(CompositeExplicitAutograd, m) { core::implement<projections_grad>(m, "_projections_grad"); }
LIGER_LIBRARY_IMPL(CUDA, m) { core::implement<projections_grad_cuda>(m, "_projections_grad"); }

}  // namespace liger::ops::projections
