#pragma once

// Shared by the files of layer_norm.

#include "core/aten.h"
#include "core/checks.h"
#include "core/rows/rows.h"

namespace liger::ops::layer_norm {

using at::Tensor;

constexpr const char* kOp = "layer_norm";

inline Tensor contiguous_or_undefined(const OptionalTensor& t) {
  return t && t->defined() ? t->contiguous() : Tensor();
}

inline at::ScalarType parameter_type(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  return weight.defined() ? weight.scalar_type() : bias.defined() ? bias.scalar_type() : x.scalar_type();
}

/// The gradient of weight or bias, without values. Undefined if it is not needed.
inline Tensor empty_parameter(const Tensor& x, at::ScalarType dtype, bool needed) {
  return needed ? at::empty_symint({x.sym_sizes().back()}, x.options().dtype(dtype)) : Tensor();
}

/// Of x, weight and bias.
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

/// Writes y and, if it is defined, statistics: (2, *rows of x), means, then reciprocal standard deviations.
using ForwardOn = void(
    Tensor y, const Tensor& statistics, Tensor x, const OptionalTensor& weight, const OptionalTensor& bias, double eps);
/// Writes dx. dx may be dy; it is undefined if it is not needed.
using BackwardOn = Gradients(
    const Tensor& dx, Tensor dy, Tensor x, const OptionalTensor& weight, const Tensor& statistics, bool needs_dweight,
    bool needs_dbias, at::ScalarType parameters);

struct Cpu {
  static ForwardOn forward;
  static BackwardOn backward;
};
struct Cuda {
  static ForwardOn forward;
  static BackwardOn backward;
};

}  // namespace liger::ops::layer_norm
