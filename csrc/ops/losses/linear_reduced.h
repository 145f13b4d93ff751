#pragma once

// Backward of reduced losses of a linear head, whose forward has computed the gradients.

#include <limits>
#include <string>

#include "core/autograd.h"
#include "ops/losses/cross_entropy.h"  // whose kernel scales gradients
#include "ops/losses/linear_chunks.h"

namespace liger::ops {
namespace detail {

/// A dense tensor as few rows as possible, within the 32-bit columns of the scaling kernel.
inline at::Tensor as_long_rows(const at::Tensor& t) {
  at::Tensor flat = t.dim() == 2 && t.stride(0) == 1 ? t.t() : t;
  if (!flat.is_contiguous()) return t;
  if (flat.numel() < std::numeric_limits<int32_t>::max()) return flat.view({1, -1});
  return flat.view({-1, flat.size(-1)});
}

/// The product; in place if `overwrite`.
inline at::Tensor scaled(
    const std::string& op_name, const at::Tensor& gradient, const at::Tensor& factor, bool overwrite) {
  using Function = at::Tensor(const at::Tensor&, const at::Tensor&, c10::string_view);
  using InPlace = void(at::Tensor&, const at::Tensor&, c10::string_view);
  if (!overwrite) {
    static const auto op = core::find_op<Function>("_cross_entropy_scale");
    return op.call(gradient, factor, op_name);
  }
  static const auto op = core::find_op<InPlace>("_cross_entropy_scale_");
  at::Tensor flat = as_long_rows(gradient);
  op.call(flat, factor, op_name);
  return gradient;
}

}  // namespace detail

/// Multiplies the gradients by the incoming gradient, on the device, at no cost if that is 1; in place if nothing else
/// can see them.
// Gradients of input, weight, bias, and of a low-rank addend's t and b; the deferred scale.
struct ReducedNode : core::BackwardNode<ReducedNode, 6> {
  const char* op = "";

  auto state() { return std::tie(op); }
  std::string name() const override { return op; }

  core::variable_list backward(core::variable_list&& grads) override {
    at::Tensor grad = std::move(grads[0]);
    constexpr size_t kGradients = 5, kLowRankInput = 3;
    if (!grad.defined()) return core::variable_list(kGradients);
    core::variable_list out;
    at::Tensor deferred_scale = take(kGradients);
    for (size_t i = 0; i < kGradients; ++i) {
      at::Tensor gradient = take(i);
      if (gradient.defined()) {
        const bool of_tokens = i == 0 || i == kLowRankInput;
        at::Tensor factor = deferred_scale.defined() ? grad * deferred_scale.select(0, !of_tokens) : grad;
        gradient = detail::scaled(name() + " backward", gradient, factor, may_overwrite(gradient, gradient));
      }
      out.push_back(std::move(gradient));
    }
    return out;
  }
};

/// Connects a loss. edges: of the node's gradients. deferred_scale: see defer_scale().
inline void connect_reduced(
    const char* op, const at::Tensor& loss, torch::autograd::edge_list&& edges, const Gradients& gradients,
    const at::Tensor& deferred_scale) {
  auto node = core::make_node<ReducedNode>();
  node->op = op;
  node->set_next_edges(std::move(edges));
  node->save(
      gradients.input, gradients.weight, gradients.bias, gradients.low_rank_input, gradients.low_rank_weight,
      deferred_scale);
  torch::autograd::set_history(loss, node);
}

}  // namespace liger::ops
