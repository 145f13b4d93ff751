#pragma once

// A tensor as rows of n contiguous elements, with two levels of strides. Kernels walk the rows by
// liger_ops/kernels/rows.py.

#include <ATen/ExpandUtils.h>

#include <algorithm>
#include <array>
#include <optional>

#include "core/aten.h"
#include "core/checks.h"
#include "runtime/kernel.h"

namespace liger::core {

/// A new tensor like x, with contiguous rows. Works on symbolic sizes.
inline at::Tensor empty_rows_like(const at::Tensor& x) {
  bool unit = x.sym_strides().back() == 1;
  return unit ? at::empty_like(x) : at::empty_like(x, x.options().memory_format(at::MemoryFormat::Contiguous));
}

/// A result in the rows of x: the memory of an argument that it overwrites, or new if it is wanted, or undefined.
inline at::Tensor result_rows(const at::Tensor& into, bool wanted, const at::Tensor& x) {
  return into.defined() || !wanted ? into : empty_rows_like(x);
}

/// Leads a walk: the result in the rows of x, or a tensor in its place.
inline at::Tensor lead_of(const at::Tensor& result, const at::Tensor& x) { return result_rows(result, true, x); }

/// t as a matrix (rows, columns). A vector becomes one row. Copies if one stride cannot describe the rows.
inline at::Tensor as_matrix(const at::Tensor& t) {
  auto sizes = t.sym_sizes();
  return t.reshape_symint({c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()});
}

/// True if t, of these sizes, has these strides. The strides of an empty tensor, and of dimensions of size 1, mean
/// nothing.
inline bool has_strides(const at::Tensor& t, at::IntArrayRef strides) {
  if (t.numel() == 0) return true;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) != 1 && t.stride(d) != strides[d]) return false;
  }
  return true;
}

/// Of tensors of one shape.
inline bool same_strides(const at::Tensor& a, const at::Tensor& b) { return has_strides(a, b.strides()); }

/// True if t, a plain tensor, has the strides of empty_rows_like(x).
inline bool has_strides_of_rows_like(const at::Tensor& t, const at::Tensor& x) {
  if (x.strides().back() != 1) return t.is_contiguous();
  if (x.is_non_overlapping_and_dense()) return same_strides(t, x);
  return has_strides(t, at::infer_dense_strides(x.sizes(), x.strides()));
}

/// A new tensor with one number per row of y, where y has the layout of empty_rows_like. The numbers are in the order
/// of y's rows in memory, as in walk_rows. `planes` adds a leading dimension of that size. Works on symbolic sizes.
inline at::Tensor empty_per_row(
    const at::Tensor& y, at::ScalarType dtype, std::optional<int64_t> planes = std::nullopt) {
  const int64_t levels = y.dim() - 1;
  const auto n = y.sym_sizes().back();
  at::SymDimVector sizes, strides;
  if (planes) {
    sizes.push_back(*planes);
    strides.push_back(c10::multiply_integers(y.sym_sizes().slice(0, levels)));
  }
  for (int64_t d = 0; d < levels; ++d) {
    sizes.push_back(y.sym_sizes()[d]);
    strides.push_back(y.sym_strides()[d] / (n == 0 ? c10::SymInt(1) : n));
  }
  return at::empty_strided_symint(sizes, strides, y.options().dtype(dtype));
}

/// `numbers` from empty_per_row, in the order of lead's rows. Copies if saved-tensor hooks or vmap changed a layout.
inline at::Tensor per_row(const at::Tensor& numbers, const at::Tensor& lead) {
  const int64_t rows = lead.dim() - 1, planes = numbers.dim() - rows, n = lead.size(-1);
  bool alike = planes == 0 || numbers.stride(0) == numbers.numel() / std::max<int64_t>(1, numbers.size(0));
  for (int64_t d = 0; alike && d < rows; ++d) {
    alike = lead.size(d) == 1 || numbers.stride(d + planes) * n == lead.stride(d);
  }
  if (alike || lead.numel() == 0) return numbers;
  std::optional<int64_t> count;
  if (planes) count = numbers.size(0);
  return empty_per_row(lead, numbers.scalar_type(), count).copy_(numbers);
}

using runtime::RowStrides;

template <size_t N>
struct Rows {
  int64_t rows = 0, n = 0, inner_rows = 1;
  std::array<RowStrides, N> strides{};

  /// Where a row of one of the tensors begins.
  int64_t offset(size_t tensor, int64_t row) const { return strides[tensor].offset(row, inner_rows); }

  /// inner_rows as kernels take it: 0 for a single level of strides, which saves them a division.
  int32_t kernel_inner_rows() const { return inner_rows == rows ? 0 : int32_t(inner_rows); }

  /// Sets the arguments of a kernel that say how many rows there are, and how to walk them.
  template <class Args>
  void pass(Args& args) const {
    args.rows = int32_t(rows);
    args.n = decltype(args.n)(n);
    args.inner_rows = kernel_inner_rows();
  }
};

namespace detail {

// Merges the outer dimensions of all tensors in their logical order; false if more than two levels remain.
template <size_t N>
bool merge_levels(const std::array<at::Tensor*, N>& tensors, Rows<N>& out) {
  const at::Tensor& lead = *tensors[0];
  int levels = 0;
  int64_t sizes[2] = {1, 1};
  std::array<RowStrides, N> strides{};
  for (int64_t d = lead.dim() - 2; d >= 0; --d) {
    int64_t size = lead.size(d);
    if (size == 1) continue;
    bool merges = levels > 0;
    for (size_t i = 0; merges && i < N; ++i) {
      if (!tensors[i]->defined()) continue;
      int64_t below = levels == 1 ? strides[i].inner : strides[i].outer;
      merges = tensors[i]->stride(d) == below * sizes[levels - 1];
    }
    if (merges) {
      sizes[levels - 1] *= size;
      continue;
    }
    if (levels == 2) return false;
    for (size_t i = 0; i < N; ++i) {
      if (tensors[i]->defined()) (levels == 0 ? strides[i].inner : strides[i].outer) = tensors[i]->stride(d);
    }
    sizes[levels++] = size;
  }
  out.inner_rows = sizes[0];
  out.strides = strides;
  return true;
}

}  // namespace detail

/// Walks tensors of one shape by the same rows. tensors[0] leads: it is dense and has unit stride in its last
/// dimension, as from empty_rows_like. A tensor that two levels of strides cannot describe is replaced by a copy in the
/// lead's layout, so others that are written must have that layout already. Undefined tensors have no strides.
template <size_t N>
Rows<N> walk_rows(const char* op, const std::array<at::Tensor*, N>& tensors) {
  const at::Tensor& lead = *tensors[0];
  Rows<N> out;
  out.n = lead.size(-1);
  out.rows = out.n ? lead.numel() / out.n : 0;
  LIGER_CHECK(
      out.rows <= std::numeric_limits<int32_t>::max() && out.n <= std::numeric_limits<int32_t>::max(), op,
      "every tensor", "have fewer than 2^31 rows and columns", out.rows, " rows of ", out.n);
  bool alike = true, unit = true;
  for (at::Tensor* t : tensors) {
    if (!t->defined()) continue;
    alike = alike && same_strides(lead, *t);
    unit = unit && (t->stride(-1) == 1 || out.n == 1);
  }
  // Rows are numbered in the lead's memory order. So forward and backward agree, whatever layouts the other tensors
  // have.
  if (!alike && !(unit && lead.is_contiguous() && detail::merge_levels<N>(tensors, out))) {
    for (at::Tensor* t : tensors) {
      if (t->defined() && !same_strides(lead, *t)) *t = at::empty_like(lead, t->options()).copy_(*t);
    }
    alike = true;
  }
  if (alike) {
    // All tensors are dense and have the same strides, so memory order is row order.
    out.inner_rows = std::max<int64_t>(out.rows, 1);
    for (size_t i = 0; i < N; ++i) out.strides[i] = tensors[i]->defined() ? RowStrides{0, out.n} : RowStrides{};
  }
  return out;
}

}  // namespace liger::core
