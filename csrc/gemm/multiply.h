#pragma once

// GEMMs on tensors. Large half-precision GEMMs on CUDA use plan.h, all others use ATen.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "core/aten.h"
#include "core/cuda/launch.h"
#include "gemm/plan.h"

namespace liger::gemm {

namespace detail {

/// A matrix as BLAS sees it. BLAS is column-major, so a row-major matrix is its own BLAS transpose (not `transposed`),
/// and a column-major matrix is `transposed`.
struct Operand {
  bool transposed;
  int64_t leading;

  static std::optional<Operand> of(const at::Tensor& t, bool row_major_only) {
    auto fits = [&](int64_t inner, int64_t outer) {
      return t.stride(inner) == 1 && t.stride(outer) >= std::max<int64_t>(1, t.size(inner)) && t.stride(outer) % 8 == 0;
    };
    if (fits(1, 0)) return Operand{false, t.stride(0)};
    if (!row_major_only && fits(0, 1)) return Operand{true, t.stride(1)};
    return std::nullopt;
  }
};

struct Planned {
  std::shared_ptr<const Plan> plan;
  void* stream = nullptr;

  /// False if ATen should compute the GEMM.
  explicit operator bool() const { return bool(plan); }

  Planned(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool sustained) {
    // BLAS computes out's transpose, so b is the first operand.
    auto first = Operand::of(b, false), second = Operand::of(a, false), into = Operand::of(out, true);
    if (!first || !second || !into) return;
    const auto addresses = uintptr_t(core::address(a)) | uintptr_t(core::address(b)) | uintptr_t(core::address(out));
    const int64_t alignment = std::min<int64_t>(256, int64_t(addresses & -addresses));
    const auto device = out.device().index();
    if (alignment < 16 || !aoti_torch_get_current_cuda_stream) return;
    if (aoti_torch_get_current_cuda_stream(device, &stream) != 0) return;
    plan = gemm::plan(
        {core::dtype_of(out), first->transposed, second->transposed, out.size(1), out.size(0), a.size(1),
         first->leading, second->leading, into->leading, alignment, sustained},
        device);
  }

  bool run(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) const {
    const int64_t bytes = int64_t(workspace_bytes(*plan));
    at::Tensor workspace;
    if (bytes > 0) workspace = at::empty({bytes}, out.options().dtype(at::kByte));
    std::string error;
    const bool ran = gemm::run(
        *plan, stream, alpha, core::address(b), core::address(a), beta, out.mutable_data_ptr(),
        workspace.defined() ? workspace.mutable_data_ptr() : nullptr, error);
    TORCH_CHECK(error.empty(), error);
    return ran;
  }
};

inline void multiply_aten(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  if (beta == 0 && alpha == 1) {
    at::mm_out(out, a, b);
  } else {
    at::addmm_out(out, out, a, b, beta, alpha);
  }
}

/// The part of a dimension that fast kernels accept: whole 16 bytes if it is contiguous in memory.
inline int64_t aligned_part(int64_t size, bool contiguous) { return contiguous ? size / 8 * 8 : size; }

inline at::Tensor first(const at::Tensor& t, int64_t dim, int64_t size) {
  return t.size(dim) == size ? t : t.narrow(dim, 0, size);
}

/// multiply() with any type of Plan. Facts: further arguments of its constructor.
template <class Plan, class... Facts>
void multiply_by(at::Tensor out, at::Tensor a, at::Tensor b, double beta, double alpha, Facts... facts) {
  if (out.stride(1) != 1 && out.stride(0) == 1) {
    std::swap(a, b);
    for (at::Tensor* t : {&out, &a, &b}) *t = t->t();
  }
  const int64_t rows = out.size(0), columns = out.size(1), depth = a.size(1);
  const int64_t aligned_rows = aligned_part(rows, a.stride(0) == 1), aligned_columns = aligned_part(columns, true),
                aligned_depth = aligned_part(depth, a.stride(1) == 1 || b.stride(0) == 1);
  at::Tensor main_part = first(first(out, 0, aligned_rows), 1, aligned_columns);
  at::Tensor a_rows = first(a, 0, aligned_rows), b_columns = first(b, 1, aligned_columns);
  at::Tensor a_main = first(a_rows, 1, aligned_depth), b_main = first(b_columns, 0, aligned_depth);
  const Plan planned(main_part, a_main, b_main, facts...);
  if (!planned) return multiply_aten(out, a, b, beta, alpha);

  // With sizes such as 50257 all cuBLAS kernels are slow, so the remainder is computed separately. The remainder of a
  // sum over k comes first, because intermediate results are rounded: they are still small then.
  if (aligned_depth < depth) {
    const int64_t remainder = depth - aligned_depth;
    multiply_aten(
        main_part, a_rows.narrow(1, aligned_depth, remainder), b_columns.narrow(0, aligned_depth, remainder), beta,
        alpha);
  }
  const double main_beta = aligned_depth < depth ? 1 : beta;
  if (!planned.run(main_part, a_main, b_main, main_beta, alpha))
    multiply_aten(main_part, a_main, b_main, main_beta, alpha);
  if (aligned_columns < columns) {
    const int64_t remainder = columns - aligned_columns;
    at::Tensor part = out.narrow(0, 0, aligned_rows).narrow(1, aligned_columns, remainder);
    multiply_aten(part, a_rows, b.narrow(1, aligned_columns, remainder), beta, alpha);
  }
  if (aligned_rows < rows) {
    at::Tensor part = out.narrow(0, aligned_rows, rows - aligned_rows);
    multiply_aten(part, a.narrow(0, aligned_rows, rows - aligned_rows), b, beta, alpha);
  }
}

}  // namespace detail

/// True if a call with this many multiplications keeps an H200 busy for some 13 ms.
inline bool is_sustained(double multiplications) { return multiplications >= double(int64_t(1) << 42); }

/// out = beta * out + alpha * a @ b, on out's device, which must be the current one. sustained: see Problem.
inline void multiply(
    at::Tensor out, const at::Tensor& a, const at::Tensor& b, double beta = 0, double alpha = 1,
    bool sustained = false) {
  const double multiplications = double(out.numel()) * double(a.size(1));
  if (multiplications < kMinMultiplications || !out.is_cuda() || !at::isReducedFloatingType(out.scalar_type())) {
    detail::multiply_aten(out, a, b, beta, alpha);
  } else {
    detail::multiply_by<detail::Planned>(out, a, b, beta, alpha, sustained);
  }
}

}  // namespace liger::gemm
