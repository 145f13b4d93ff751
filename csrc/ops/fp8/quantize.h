#pragma once

// Matrices in e4m3 with fp32 scales, for the operators that quantise and for those that multiply what they give.

#include "core/aten.h"
#include "core/cuda.h"
#include "core/operator.h"
#include "core/rows.h"

namespace liger::ops::quantize {

/// x must not require a gradient, so that nothing is ever saved.
template <class Op, class Type>
struct Operator : core::Operator<Op, Type> {
  using Edges = core::Positions<>;
  using Constants = core::Positions<0>;
  using Saves = core::Saves<>;
  using Differentiable = core::Positions<>;

  template <class Node>
  static core::variable_list backward(Node&, core::variable_list&&) {
    return {};
  }
};

/// Of x and the rows of a result from `first` on, which are at multiples of 16 bytes, too.
inline bool is_aligned(const at::Tensor& x, const core::Rows<2>& walk, int64_t first) {
  return core::aligned16(core::address(x)) && walk.aligned_strides() && first % 16 == 0;
}

}  // namespace liger::ops::quantize

namespace liger::ops::quantize_rows {

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

}  // namespace liger::ops::quantize_rows
