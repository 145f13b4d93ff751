// at::mm with an algorithm chosen by gemm/multiply.h. It is an operator, so that torch.compile keeps it in its graph.

#include "core/private.h"
#include "gemm/multiply.h"

namespace liger::ops::mm {
namespace {

using at::Tensor;

struct Cuda {};
struct Others {};

struct Mm : core::Private<Mm, Tensor(const Tensor&, const Tensor&)> {
  static constexpr const char* kName = "_mm";
  static constexpr const char* kArguments = "a, b";

  template <class Device>
  static Tensor run(const Tensor& a, const Tensor& b) {
    LIGER_CHECK(a.dim() == 2, kName, "a", "be a matrix", a.sym_sizes());
    core::check_same_device(kName, "b", b, "a", a);
    LIGER_CHECK(
        b.dim() == 2 && b.sym_size(0) == a.sym_size(1), kName, "b", c10::str("be a matrix of ", a.sym_size(1), " rows"),
        b.sym_sizes());
    LIGER_CHECK(
        b.scalar_type() == a.scalar_type(), kName, "b", c10::str("have the dtype of a, ", a.scalar_type()),
        b.scalar_type());
    if constexpr (std::is_same_v<Device, Cuda>) {
      c10::DeviceGuard guard(a.device());
      Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
      gemm::multiply(out, a, b, 0, 1, /*sustained=*/true);
      return out;
    } else {
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      return at::mm(a, b);
    }
  }
};

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) { Mm::define(m); }
LIGER_LIBRARY_IMPL(CompositeExplicitAutograd, m) { Mm::implement<Others>(m); }
LIGER_LIBRARY_IMPL(CUDA, m) { Mm::implement<Cuda>(m); }

}  // namespace liger::ops::mm
