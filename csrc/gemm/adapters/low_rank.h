#pragma once

// A low-rank addend t b^T of a product x w^T, for losses of a head with adapters. It is written first, and the product
// is added to it: neither w + b a nor a copy of w exists.
//
// M rows, C columns, R ranks. t: (M, R), b: (C, R), each in fp32 or in the product's dtype. Sums are in fp32, or in
// fp64 for fp64. In 16 bits on CUDA, the kernels of lora_products.h multiply, unless fp32 b goes with an fp16 product.
// Otherwise a part of the columns is converted at a time.

#include <algorithm>

#include "core/aten.h"
#include "core/rows/rows.h"
#include "gemm/adapters/lora_products.h"
#include "gemm/multiply.h"

namespace liger::gemm {

class LowRank {
 public:
  /// like: the x of the product. Without t, nothing is added.
  LowRank(const char* op, const at::Tensor& t, const at::Tensor& b, const at::Tensor& like) : op_(op) {
    if (!t.defined()) return;
    const auto wide = core::compute_type(like), dtype = like.scalar_type();
    ranks_ = b.size(1);
    by_kernels_ = core::runs_kernels(like) && at::isReducedFloatingType(dtype) && ranks_ > 0 &&
        (dtype == at::kBFloat16 || b.scalar_type() == dtype);
    constexpr int64_t kStep = kernels::constants::lora_products::RANK_STEP;
    padded_ = by_kernels_ ? (ranks_ + kStep - 1) / kStep * kStep : ranks_;
    t_ = t.reshape({c10::multiply_integers(t.sizes().slice(0, t.dim() - 1)), ranks_}).to(wide);
    t_ = padded_ > ranks_ ? at::constant_pad_nd(t_, {0, padded_ - ranks_}) : t_.contiguous();
    b_ = b.stride(1) == 1 || ranks_ < 2 ? b : b.contiguous();
  }

  bool defined() const { return t_.defined(); }
  const at::Tensor& b() const { return b_; }

  /// Prepares the gradients of t and b, (..., R) and (C, R); undefined: not wanted. finish() writes them.
  void compute_gradients(const at::Tensor& of_t, const at::Tensor& of_b) {
    of_t_ = of_t, of_b_ = of_b;
    if (of_t.defined()) t_sum_ = at::zeros_like(t_);
    if (of_b.defined()) b_sum_ = at::zeros({b_.size(0), ranks_}, t_.options());
  }

  /// out = scale * (t b^T + bias), for the rows from `row` on. of_b, bias: of out's columns, in rows of b and in the
  /// product's dtype; bias may be undefined. out: of the product's dtype or t's.
  void write(const at::Tensor& out, int64_t row, const at::Tensor& of_b, const at::Tensor& bias, double scale) const {
    const int64_t rows = out.size(0), columns = out.size(1);
    if (rows == 0 || columns == 0) return;
    const at::Tensor t = t_.narrow(0, row, rows);
    const bool is_wide = out.scalar_type() == t.scalar_type();
    if (by_kernels_ && !is_wide) {
      at::Tensor addend;
      if (bias.defined()) addend = scale == 1 ? bias.contiguous() : bias * scale;
      return expand(op_, out, t, adapter(of_b), ranks_, padded_, addend, scale);
    }
    const at::Tensor own = t.narrow(1, 0, ranks_), b = widened(of_b).t();
    for_parts(rows, columns, is_wide, [&](int64_t first, int64_t count) {
      at::Tensor part = out.narrow(1, first, count);
      at::Tensor sum = is_wide ? part : at::empty({rows, count}, t.options());
      detail::multiply_aten(sum, own, b.narrow(1, first, count), 0, scale);
      if (bias.defined()) sum.add_(bias.narrow(0, first, count), scale);
      if (!is_wide) part.copy_(sum);
    });
  }

  /// Adds the gradients from that of a part of the product. t_scale, b_scale: factors of each.
  void add_gradients(const at::Tensor& grad, int64_t row, int64_t column, double t_scale, double b_scale) {
    const int64_t rows = grad.size(0), columns = grad.size(1);
    if (rows == 0 || columns == 0 || !(t_sum_.defined() || b_sum_.defined())) return;
    const at::Tensor t = t_.narrow(0, row, rows), b = columns == b_.size(0) ? b_ : b_.narrow(0, column, columns);
    at::Tensor of_t = t_sum_.defined() ? t_sum_.narrow(0, row, rows) : t_sum_;
    at::Tensor of_b = b_sum_.defined() ? b_sum_.narrow(0, column, columns) : b_sum_;
    if (by_kernels_) {
      if (of_t.defined()) {
        const at::Tensor part = at::empty(of_t.sizes(), of_t.options());
        rows_product(op_, part, grad, adapter(b), padded_, t_scale);
        of_t.add_(part);
      }
      if (!of_b.defined()) return;
      const bool all_digits = b.scalar_type() == at::kFloat;
      of_b.add_(columns_product(op_, grad, t, ranks_, padded_, /*by_feature=*/true, all_digits, b_scale).sum(0));
      return;
    }
    const at::Tensor wide_b = widened(b);
    for_parts(rows, columns, grad.scalar_type() == t.scalar_type(), [&](int64_t first, int64_t count) {
      const at::Tensor part = widened(grad.narrow(1, first, count));
      if (of_t.defined()) of_t.addmm_(part, wide_b.narrow(0, first, count), 1, t_scale);
      if (of_b.defined()) of_b.narrow(0, first, count).addmm_(part.t(), t, 1, b_scale);
    });
  }

  /// Sum over all columns, for the caller to add up if others have more columns.
  const at::Tensor& gradient_of_t() const { return t_sum_; }

  void finish() {
    if (of_t_.defined()) of_t_.copy_(t_sum_.narrow(1, 0, ranks_).view_as(of_t_));
    if (of_b_.defined()) of_b_.copy_(b_sum_);
  }

 private:
  at::Tensor widened(const at::Tensor& part) const { return part.to(t_.scalar_type()); }

  /// of_b as the kernels take it. Chunks of rows share it.
  const Adapter& adapter(const at::Tensor& of_b) const {
    if (!of_b.is_same(adapted_)) {
      adapter_ = stacked(op_, {of_b.t()}, padded_, b_.scalar_type());
      adapted_ = of_b;
    }
    return adapter_;
  }

  /// All columns at once if no part of the product is converted.
  template <class F>
  void for_parts(int64_t rows, int64_t columns, bool at_once, const F& f) const {
    constexpr int64_t kBytes = 32 << 20;
    const int64_t fitting = std::max<int64_t>(1, kBytes / (rows * int64_t(t_.element_size())));
    const int64_t step = at_once ? columns : fitting;
    for (int64_t first = 0; first < columns; first += step) f(first, std::min(step, columns - first));
  }

  const char* op_;
  int64_t ranks_ = 0, padded_ = 0;
  bool by_kernels_ = false;
  at::Tensor t_, b_, t_sum_, b_sum_, of_t_, of_b_;
  mutable Adapter adapter_;
  mutable at::Tensor adapted_;
};

}  // namespace liger::gemm
