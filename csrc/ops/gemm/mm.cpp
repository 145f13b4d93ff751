// at::mm with an algorithm chosen by gemm/multiply.h. It is an operator, so that torch.compile keeps it in its graph.

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "core/aten.h"
#include "core/checks.h"
#include "core/memory.h"
#include "core/registration.h"
#include "gemm/multiply.h"

namespace liger::ops::mm {
namespace {

using at::Tensor;

constexpr const char* kOp = "_mm";

void check(const Tensor& a, const Tensor& b) {
  LIGER_CHECK(a.dim() == 2, kOp, "a", "be a matrix", a.sym_sizes());
  core::check_same_device(kOp, "b", b, "a", a);
  LIGER_CHECK(
      b.dim() == 2 && b.sym_size(0) == a.sym_size(1), kOp, "b", c10::str("be a matrix of ", a.sym_size(1), " rows"),
      b.sym_sizes());
  LIGER_CHECK(
      b.scalar_type() == a.scalar_type(), kOp, "b", c10::str("have the dtype of a, ", a.scalar_type()),
      b.scalar_type());
}

Tensor mm(const Tensor& a, const Tensor& b) {
  check(a, b);
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return at::mm(a, b);
}

Tensor mm_cuda(const Tensor& a, const Tensor& b) {
  check(a, b);
  c10::DeviceGuard guard(a.device());
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  gemm::multiply(out, a, b, 0, 1, /*sustained=*/true);
  return out;
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) { core::define(m, "_mm(Tensor a, Tensor b) -> Tensor"); }

LIGER_LIBRARY_IMPL(CompositeExplicitAutograd, m) { core::implement<mm>(m, "_mm"); }
LIGER_LIBRARY_IMPL(CUDA, m) { core::implement<mm_cuda>(m, "_mm"); }

}  // namespace liger::ops::mm
