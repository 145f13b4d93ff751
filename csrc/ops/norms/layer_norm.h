#pragma once

// Shared by the files of layer_norm.

#include "core/aten.h"
#include "core/checks.h"
#include "core/rows.h"

namespace liger::ops::layer_norm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "layer_norm";

inline Tensor contiguous_or_undefined(const OptionalTensor& t) {
  return t && t->defined() ? t->contiguous() : Tensor();
}

/// Means, then reciprocal standard deviations: (2, *rows of x).
inline Tensor empty_statistics(const Tensor& y) { return core::empty_per_row(y, core::compute_type(y), 2); }

inline at::ScalarType parameter_type(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return weight.defined() ? weight.scalar_type() : bias.defined() ? bias.scalar_type() : x.scalar_type();
}

struct Forward {
  Tensor y, statistics;
};

struct Gradients {
  Tensor dx, dweight, dbias;
};

using ForwardOn =
    Forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps, bool save);
/// Writes dx. dx may be dy; it is undefined if it is not needed.
using BackwardOn = Gradients(
    const Tensor& dy, const Tensor& x, const OptionalTensor& weight, const Tensor& statistics, const Tensor& dx,
    bool needs_dweight, bool needs_dbias, at::ScalarType parameters);

struct Cpu {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Cuda {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Meta {
  static ForwardOn forward;
  static BackwardOn backward;
};

}  // namespace liger::ops::layer_norm
