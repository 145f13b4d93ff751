// gemm/multiply.h with plans that need no GPU: they accept the operands that cuBLAS's fast kernels accept, and compute
// the GEMM with ATen.

#include <torch/library.h>

#include "gemm/multiply.h"

namespace {

struct Planned {
  using Operand = liger::gemm::detail::Operand;
  bool found = false;

  Planned(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
    auto first = Operand::of(b, false), second = Operand::of(a, false), into = Operand::of(out, true);
    if (!first || !second || !into || (first->transposed && second->transposed)) return;
    const bool depth_is_contiguous = first->transposed || !second->transposed;
    auto whole = [](int64_t size, bool contiguous) { return size > 0 && (!contiguous || size % 8 == 0); };
    TORCH_CHECK(out.size(0) == a.size(0) && out.size(1) == b.size(1) && a.size(1) == b.size(0), "sizes do not match");
    found = whole(out.size(1), true) && whole(out.size(0), second->transposed) && whole(a.size(1), depth_is_contiguous);
  }
  explicit operator bool() const { return found; }
  bool run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) const {
    ++runs;
    if (refuse) return false;
    at::addmm_out(out, out, a, b, beta, alpha);
    return true;
  }

  static inline int64_t runs = 0;
  static inline bool refuse = false;
};

int64_t multiply(at::Tensor out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha, bool refuse) {
  Planned::runs = 0;
  Planned::refuse = refuse;
  liger::gemm::detail::multiply_by<Planned>(out, a, b, beta, alpha);
  return Planned::runs;
}

}  // namespace

TORCH_LIBRARY(liger_on_cpu, m) {
  m.def("multiply(Tensor(a!) out, Tensor a, Tensor b, float beta, float alpha, bool refuse) -> int", multiply);
}
