#pragma once

// Matrices in e4m3 with fp32 scales, for the operators that quantise and for those that multiply what they give.

#include <ATen/ATen.h>

namespace liger::ops::quantize_rows {

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

}  // namespace liger::ops::quantize_rows
