#pragma once

// What the files of rms_norm share, and what fused_add_rms_norm takes from them: the same kernels with a residual, the
// same backward.

#include <ATen/ATen.h>

#include <string>
#include <string_view>
#include <tuple>

namespace liger::ops::rms_norm {

using at::Tensor;

constexpr const char* kOp = "rms_norm";

struct Forward {
  Tensor y, s, rstd;  // s is undefined without a residual, rstd unless asked for
};

void check(
    const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
    std::string_view casting_mode);

inline bool rounds_first(std::string_view casting_mode) { return casting_mode == "llama"; }

using ForwardOn = Forward(
    const char* op, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps, double offset,
    std::string_view casting_mode, bool save_rstd);
/// Writes dx, which may be dy and is undefined where nobody asks for it; ds is undefined without a residual, or where
/// nothing arrives for the sum. (dx, dweight)
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

/// Gradients of s and weight; may use up dy's buffer where `overwrite_dy`.
std::tuple<Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& ds, const Tensor& s, const Tensor& weight, const Tensor& rstd, double offset,
    const std::string& casting_mode, int64_t wanted, bool overwrite_dy);

}  // namespace liger::ops::rms_norm
