#pragma once

// Shared by the files of rms_norm_gated.

#include <tuple>

#include "core/aten.h"
#include "core/casting_mode.h"
#include "core/rows/rows.h"

namespace liger::ops::rms_norm_gated {

using at::Tensor;

constexpr const char* kOp = "rms_norm_gated";
constexpr const char* kBackward = "rms_norm_gated backward";

struct Options {
  double eps = 0, offset = 0;
  bool llama = false, sigmoid = false, gate_first = false;

  // Where rows are rounded to x's dtype, besides the result.
  bool rounds_row() const { return llama; }
  bool rounds_product(const Tensor& x, const Tensor& weight) const {
    return llama && !gate_first && weight.defined() && weight.scalar_type() == x.scalar_type();
  }
  at::ScalarType result_type(const Tensor& x, const Tensor& weight) const {
    const bool wider = llama && gate_first && weight.defined();
    return wider ? at::promote_types(x.scalar_type(), weight.scalar_type()) : x.scalar_type();
  }
};

/// (..., n) as (..., groups, columns of a group). t: with contiguous rows.
inline Tensor by_group(const Tensor& t, const c10::SymInt& groups, const c10::SymInt& columns) {
  return t.unflatten_symint(-1, {groups, columns});
}

/// Of x, the gate and the weight.
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// x, gate, dx, dgate, dy: (..., groups * columns); weight: (groups * columns,), may be undefined; rstd: (..., groups)

/// Writes y and, if it is defined, rstd. Without group_size, a row is one group.
using ForwardOn = void(
    Tensor y, const Tensor& rstd, Tensor x, Tensor gate, Tensor weight, const Options& options,
    std::optional<int64_t> group_size);
/// Writes dx and dgate. dx may be dy; both are undefined if they are not needed. They have the layout of
/// empty_rows_like(x).
using BackwardOn = Gradients(
    Tensor dx, Tensor dgate, Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, const Options& options,
    bool needs_dweight);

struct Cpu {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Cuda {
  static ForwardOn forward;
  static BackwardOn backward;
};

}  // namespace liger::ops::rms_norm_gated
