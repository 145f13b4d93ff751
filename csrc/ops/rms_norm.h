#pragma once

#include <ATen/ATen.h>

#include <string_view>

namespace liger::ops {

// What fused_add_rms_norm shares with rms_norm: the same kernels with a residual, the same backward.

struct RmsNormForward {
  at::Tensor y, s, rstd;  // s is undefined without a residual, rstd unless asked for
};

void check_rms_norm(
    const char* op, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
    std::string_view casting_mode);
RmsNormForward rms_norm_forward_cpu(
    const char* op, const at::Tensor& x, at::Tensor residual, const at::Tensor& weight, double eps, double offset,
    std::string_view casting_mode, bool save_rstd);
RmsNormForward rms_norm_forward_cuda(
    const char* op, const at::Tensor& x, at::Tensor residual, const at::Tensor& weight, double eps, double offset,
    std::string_view casting_mode, bool save_rstd);
RmsNormForward rms_norm_forward_meta(
    const char* op, const at::Tensor& x, at::Tensor residual, const at::Tensor& weight, double eps, double offset,
    std::string_view casting_mode, bool save_rstd);

/// Gradients of s and weight; may use up dy's buffer where `overwrite_dy`.
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& dy, const at::Tensor& ds, const at::Tensor& s, const at::Tensor& weight, const at::Tensor& rstd,
    double offset, const std::string& casting_mode, bool needs_dx, bool needs_dweight, bool overwrite_dy);

}  // namespace liger::ops
