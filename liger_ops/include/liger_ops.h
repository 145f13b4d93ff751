#pragma once

// torch.ops.liger.* as C++ functions, on libtorch: the same operators through the same dispatcher, differentiable and
// without Python. Names, arguments and defaults are those of the schemas; what an operator computes is told there.
//
//   find_package(liger_ops REQUIRED)                         # CMAKE_PREFIX_PATH=$(python -m liger_ops --cmake-prefix)
//   target_link_libraries(program PRIVATE liger_ops::liger_ops)

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace liger {
namespace detail {

template <class Function>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace detail

inline at::Tensor rms_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt, double eps = 1e-6, double offset = 0.0,
    std::string_view casting_mode = "llama") {
  static const auto op = detail::find<decltype(rms_norm)>("liger::rms_norm");
  return op.call(x, weight, eps, offset, casting_mode);
}

inline std::tuple<at::Tensor, at::Tensor> fused_add_rms_norm(
    const at::Tensor& x, const at::Tensor& residual, const std::optional<at::Tensor>& weight = std::nullopt,
    double eps = 1e-6, double offset = 0.0, std::string_view casting_mode = "llama") {
  static const auto op = detail::find<decltype(fused_add_rms_norm)>("liger::fused_add_rms_norm");
  return op.call(x, residual, weight, eps, offset, casting_mode);
}

inline at::Tensor layer_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight = std::nullopt,
    const std::optional<at::Tensor>& bias = std::nullopt, double eps = 1e-5) {
  static const auto op = detail::find<decltype(layer_norm)>("liger::layer_norm");
  return op.call(x, weight, bias, eps);
}

inline std::tuple<at::Tensor, at::Tensor> rope(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos, const at::Tensor& sin, bool interleaved = false,
    at::OptionalIntArrayRef mrope_section = std::nullopt) {
  static const auto op = detail::find<decltype(rope)>("liger::rope");
  return op.call(q, k, cos, sin, interleaved, mrope_section);
}

inline std::tuple<at::Tensor, at::Tensor> rope_freqs_cis(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& freqs_cis) {
  static const auto op = detail::find<decltype(rope_freqs_cis)>("liger::rope_freqs_cis");
  return op.call(q, k, freqs_cis);
}

inline at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = detail::find<decltype(swiglu)>("liger::swiglu");
  return op.call(gate, up);
}

inline at::Tensor swiglu_packed(const at::Tensor& gate_up) {
  static const auto op = detail::find<decltype(swiglu_packed)>("liger::swiglu_packed");
  return op.call(gate_up);
}

inline at::Tensor swiglu_linear(
    const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias = std::nullopt) {
  static const auto op = detail::find<decltype(swiglu_linear)>("liger::swiglu_linear");
  return op.call(gate, up, weight, bias);
}

inline at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up, std::string_view approximate = "tanh") {
  static const auto op = detail::find<decltype(geglu)>("liger::geglu");
  return op.call(gate, up, approximate);
}

inline at::Tensor geglu_packed(const at::Tensor& gate_up, std::string_view approximate = "tanh") {
  static const auto op = detail::find<decltype(geglu_packed)>("liger::geglu_packed");
  return op.call(gate_up, approximate);
}

inline at::Tensor geglu_linear(
    const at::Tensor& gate, const at::Tensor& up, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias = std::nullopt, std::string_view approximate = "tanh") {
  static const auto op = detail::find<decltype(geglu_linear)>("liger::geglu_linear");
  return op.call(gate, up, weight, bias, approximate);
}

inline at::Tensor embedding(
    const at::Tensor& input, const at::Tensor& weight, std::optional<int64_t> padding_idx = std::nullopt) {
  static const auto op = detail::find<decltype(embedding)>("liger::embedding");
  return op.call(input, weight, padding_idx);
}

inline at::Tensor cross_entropy(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight = std::nullopt,
    std::string_view reduction = "mean", int64_t ignore_index = -100, double label_smoothing = 0.0,
    double lse_square_scale = 0.0, std::optional<double> softcap = std::nullopt) {
  static const auto op = detail::find<decltype(cross_entropy)>("liger::cross_entropy");
  return op.call(logits, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap);
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cross_entropy_with_metrics(
    const at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight = std::nullopt,
    std::string_view reduction = "mean", int64_t ignore_index = -100, double label_smoothing = 0.0,
    double lse_square_scale = 0.0, std::optional<double> softcap = std::nullopt) {
  static const auto op = detail::find<decltype(cross_entropy_with_metrics)>("liger::cross_entropy_with_metrics");
  return op.call(logits, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap);
}

inline at::Tensor cross_entropy_(
    at::Tensor& logits, const at::Tensor& target, const std::optional<at::Tensor>& weight = std::nullopt,
    std::string_view reduction = "mean", int64_t ignore_index = -100, double label_smoothing = 0.0,
    double lse_square_scale = 0.0, std::optional<double> softcap = std::nullopt) {
  static const auto op = detail::find<decltype(cross_entropy_)>("liger::cross_entropy_");
  return op.call(logits, target, weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap);
}

inline at::Tensor fused_linear_cross_entropy(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const std::optional<at::Tensor>& ce_weight = std::nullopt,
    std::string_view reduction = "mean", int64_t ignore_index = -100, double label_smoothing = 0.0,
    double lse_square_scale = 0.0, std::optional<double> softcap = std::nullopt, double logits_scale = 1.0,
    const std::optional<at::Tensor>& token_weight = std::nullopt, std::optional<int64_t> memory_budget = std::nullopt) {
  static const auto op = detail::find<decltype(fused_linear_cross_entropy)>("liger::fused_linear_cross_entropy");
  return op.call(
      input, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
      logits_scale, token_weight, memory_budget);
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused_linear_cross_entropy_with_metrics(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const std::optional<at::Tensor>& ce_weight = std::nullopt,
    std::string_view reduction = "mean", int64_t ignore_index = -100, double label_smoothing = 0.0,
    double lse_square_scale = 0.0, std::optional<double> softcap = std::nullopt, double logits_scale = 1.0,
    const std::optional<at::Tensor>& token_weight = std::nullopt, std::optional<int64_t> memory_budget = std::nullopt) {
  static const auto op =
      detail::find<decltype(fused_linear_cross_entropy_with_metrics)>("liger::fused_linear_cross_entropy_with_metrics");
  return op.call(
      input, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
      logits_scale, token_weight, memory_budget);
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> fused_linear_cross_entropy_with_log_probs(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt, const std::optional<at::Tensor>& ce_weight = std::nullopt,
    std::string_view reduction = "mean", int64_t ignore_index = -100, double label_smoothing = 0.0,
    double lse_square_scale = 0.0, std::optional<double> softcap = std::nullopt, double logits_scale = 1.0,
    const std::optional<at::Tensor>& token_weight = std::nullopt, std::optional<int64_t> memory_budget = std::nullopt) {
  static const auto op = detail::find<decltype(fused_linear_cross_entropy_with_log_probs)>(
      "liger::fused_linear_cross_entropy_with_log_probs");
  return op.call(
      input, weight, target, bias, ce_weight, reduction, ignore_index, label_smoothing, lse_square_scale, softcap,
      logits_scale, token_weight, memory_budget);
}

/// Loads the kernels of a CUDA device whose names begin with one of `kernels` (all, if none is named), before a graph
/// capture or a timed region. The number loaded.
inline int64_t preload(int64_t device, std::vector<std::string> kernels = {}) {
  static const auto op =
      detail::find<std::tuple<int64_t, int64_t>(int64_t, std::vector<std::string>)>("liger::_preload");
  return std::get<0>(op.call(device, std::move(kernels)));
}

/// JSON: devices, packs, and the launches of each kernel by the source it came from.
inline std::string status() {
  static const auto op = detail::find<std::string()>("liger::_status");
  return op.call();
}

}  // namespace liger
