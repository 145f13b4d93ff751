#pragma once

// GEMMs of tensors: large ones of half precision on CUDA by plan.h, others by ATen.

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "core/cuda.h"
#include "gemm/plan.h"

namespace liger::gemm {

namespace detail {

/// A matrix as BLAS sees it, columns first: transposed if its own rows follow each other in memory.
struct Operand {
  bool transposed;
  int64_t leading;

  static std::optional<Operand> of(const at::Tensor& t, bool as_rows) {
    // Rows of ours are BLAS's columns.
    auto fits = [&](int64_t inner, int64_t outer) {
      return t.stride(inner) == 1 && t.stride(outer) >= std::max<int64_t>(1, t.size(inner)) && t.stride(outer) % 8 == 0;
    };
    if (fits(1, 0)) return Operand{false, t.stride(0)};
    if (!as_rows && fits(0, 1)) return Operand{true, t.stride(1)};
    return std::nullopt;
  }
};

struct Planned {
  std::shared_ptr<const Plan> plan;
  void* stream = nullptr;

  /// False: ATen's way is the better one.
  explicit operator bool() const { return bool(plan); }

  Planned(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool sustained) {
    // Row by row, out is BLAS's transpose of itself: b comes first.
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

/// Of a dimension that is contiguous in memory, kernels of full speed take whole 16 bytes.
inline int64_t whole(int64_t size, bool contiguous) { return contiguous ? size / 8 * 8 : size; }

inline at::Tensor first(const at::Tensor& t, int64_t dim, int64_t size) {
  return t.size(dim) == size ? t : t.narrow(dim, 0, size);
}

/// multiply(), with plans of whatever kind, for which these facts are.
template <class Plan, class... Facts>
void multiply_by(at::Tensor out, at::Tensor a, at::Tensor b, double beta, double alpha, Facts... facts) {
  if (out.stride(1) != 1 && out.stride(0) == 1) {
    std::swap(a, b);
    for (at::Tensor* t : {&out, &a, &b}) *t = t->t();
  }
  const int64_t rows = out.size(0), columns = out.size(1), depth = a.size(1);
  const int64_t whole_rows = whole(rows, a.stride(0) == 1), whole_columns = whole(columns, true),
                whole_depth = whole(depth, a.stride(1) == 1 || b.stride(0) == 1);
  at::Tensor most = first(first(out, 0, whole_rows), 1, whole_columns);
  at::Tensor a_rows = first(a, 0, whole_rows), b_columns = first(b, 1, whole_columns);
  at::Tensor a_most = first(a_rows, 1, whole_depth), b_most = first(b_columns, 0, whole_depth);
  const Plan planned(most, a_most, b_most, facts...);
  if (!planned) return multiply_aten(out, a, b, beta, alpha);

  // In widths such as 50257 all of cuBLAS's kernels are slow, so what is over goes alone. What is over of a sum comes
  // first: it is rounded while it is small.
  if (whole_depth < depth) {
    const int64_t left = depth - whole_depth;
    multiply_aten(most, a_rows.narrow(1, whole_depth, left), b_columns.narrow(0, whole_depth, left), beta, alpha);
  }
  const double kept = whole_depth < depth ? 1 : beta;
  if (!planned.run(most, a_most, b_most, kept, alpha)) multiply_aten(most, a_most, b_most, kept, alpha);
  if (whole_columns < columns) {
    const int64_t left = columns - whole_columns;
    at::Tensor part = out.narrow(0, 0, whole_rows).narrow(1, whole_columns, left);
    multiply_aten(part, a_rows, b.narrow(1, whole_columns, left), beta, alpha);
  }
  if (whole_rows < rows) {
    at::Tensor part = out.narrow(0, whole_rows, rows - whole_rows);
    multiply_aten(part, a.narrow(0, whole_rows, rows - whole_rows), b, beta, alpha);
  }
}

}  // namespace detail

/// out = beta * out + alpha * a @ b, on out's device, which is the current one. sustained: see Problem.
inline void multiply(
    at::Tensor out, const at::Tensor& a, const at::Tensor& b, double beta = 0, double alpha = 1,
    bool sustained = false) {
  const double multiplications = double(out.numel()) * double(a.size(1));
  if (multiplications < kLeastMultiplications || !out.is_cuda() || !at::isReducedFloatingType(out.scalar_type())) {
    detail::multiply_aten(out, a, b, beta, alpha);
  } else {
    detail::multiply_by<detail::Planned>(out, a, b, beta, alpha, sustained);
  }
}

}  // namespace liger::gemm
