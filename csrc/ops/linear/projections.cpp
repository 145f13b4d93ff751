// The input gradient of liger_ops/linear/project.py as one operator. Otherwise torch.compile would copy the sum
// before every GEMM.

#include "core/private.h"
#include "gemm/multiply.h"

namespace liger::ops::projections {
namespace {

using at::Tensor;
using at::TensorList;

struct Cuda {};
struct Others {};

// grads: (rows, out) each, weights: (out, n) -> (rows, n), the sum of grad @ weight, accumulated in the GEMMs.
struct ProjectionsGrad : core::Private<ProjectionsGrad, Tensor(TensorList, TensorList)> {
  static constexpr const char* kName = "_projections_grad";
  static constexpr const char* kArguments = "grads, weights";

  template <class Device>
  static Tensor run(TensorList grads, TensorList weights) {
    LIGER_CHECK(
        !grads.empty() && grads.size() == weights.size(), kName, "grads and weights", "have equal, non-zero length",
        grads.size(), " and ", weights.size());
    if constexpr (std::is_same_v<Device, Cuda>) {
      c10::DeviceGuard guard(grads[0].device());
      Tensor sum = at::empty({grads[0].size(0), weights[0].size(1)}, grads[0].options());
      for (size_t i = 0; i < grads.size(); ++i) gemm::multiply(sum, grads[i], weights[i], i > 0, 1, /*sustained=*/true);
      return sum;
    } else {
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      Tensor sum = at::mm(grads[0], weights[0]);
      for (size_t i = 1; i < grads.size(); ++i) sum.addmm_(grads[i], weights[i]);
      return sum;
    }
  }
};

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) { ProjectionsGrad::define(m); }
LIGER_LIBRARY_IMPL(CompositeExplicitAutograd, m) { ProjectionsGrad::implement<Others>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { ProjectionsGrad::implement<Cuda>(m); }

}  // namespace liger::ops::projections
