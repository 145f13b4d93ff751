#pragma once

// Shared by the files of rms_norm and by fused_add_rms_norm, which uses the same kernels with a residual, and the same
// backward.

#include <string>
#include <string_view>
#include <tuple>

#include "core/aten.h"
#include "core/casting_mode.h"

namespace liger::ops::rms_norm {

using at::Tensor;

constexpr const char* kOp = "rms_norm";

struct Forward {
  Tensor y, s, rstd;  // s: undefined without a residual; rstd: undefined unless requested
};

void check(
    const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
    std::string_view casting_mode);

using ForwardOn = Forward(
    const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset,
    std::string_view casting_mode, bool save_rstd);
/// Writes dx and returns (dx, dweight). dx may be dy; it is undefined if it is not needed. ds is undefined without a
/// residual, or if the sum receives no gradient.
using BackwardOn = std::tuple<Tensor, Tensor>(
    const Tensor& dy, const Tensor& ds, const Tensor& x, const Tensor& weight, const Tensor& rstd, double offset,
    std::string_view casting_mode, const Tensor& dx, bool needs_dweight);

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

/// Gradients of s and weight. `overwrite_dy` allows the result to overwrite dy.
std::tuple<Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& ds, const Tensor& s, const Tensor& weight, const Tensor& rstd, double offset,
    const std::string& casting_mode, int64_t wanted, bool overwrite_dy);

}  // namespace liger::ops::rms_norm
