#pragma once

// Matrices in e4m3 with fp32 scales, for the operators that quantise and for those that multiply what they give.

#include "core/aten.h"
#include "core/rows/rows.h"

namespace liger::gemm::e4m3 {

/// On CUDA, a matrix as rows of the kernels, which are those from `first` on of a result.
struct Part {
  at::Tensor x;
  core::Rows<2> walk;
  int64_t first;
};

/// x is copied if two levels of strides cannot describe it. result: of all parts.
inline std::vector<Part> parts_of(const char* op, at::TensorList xs, const at::Tensor& result) {
  std::vector<Part> parts;
  int64_t first = 0;
  for (at::Tensor x : xs) {
    const int64_t n = x.size(-1), rows = x.numel() / n;
    // Only its shape and layout are used.
    at::Tensor lead = result.view({-1}).narrow(0, first * n, x.numel()).view(x.sizes());
    const auto walk = core::walk_rows<2>(op, {&lead, &x});
    if (rows) parts.push_back({std::move(x), walk, first});
    first += rows;
  }
  return parts;
}

}  // namespace liger::gemm::e4m3

namespace liger::gemm::e4m3::rows {

/// On CPU. q: undefined, or the numbers, (..., n). given: whether the scales, (..., 1), are there already.
void quantize_rows_of(const at::Tensor& q, const at::Tensor& scale, const at::Tensor& x, bool given);

/// Rows of x, (..., n), and one scale each, (..., 1); their transposes (n, T), and one scale for each column, (n, 1).
/// Undefined where they are not wanted. Of several matrices with n columns: as if they were stacked.
struct Quantized {
  at::Tensor q, scale, q_t, scale_t;
};

enum class Columns { none, scales, all };

// quantize: allocates and computes. with_scales: transposes alone, with scales from an earlier call.
struct Cpu {
  static Quantized quantize(const char* op, at::TensorList xs, bool rows, Columns columns);
  static Quantized with_scales(const char* op, at::TensorList xs, const at::Tensor& scale_t);
};
struct Cuda {
  static Quantized quantize(const char* op, at::TensorList xs, bool rows, Columns columns);
  static Quantized with_scales(const char* op, at::TensorList xs, const at::Tensor& scale_t);
};
struct Meta {
  static Quantized quantize(const char* op, at::TensorList xs, bool rows, Columns columns);
  static Quantized with_scales(const char* op, at::TensorList xs, const at::Tensor& scale_t);
};

}  // namespace liger::gemm::e4m3::rows
