#pragma once

// Backward of reduced losses of a linear head, whose forward has computed the gradients.

#include "core/autograd.h"
#include "ops/losses/linear_chunks.h"

namespace liger::ops {

/// Multiplies the gradients by the incoming gradient, on the device, at no cost if that is 1; in place if nothing else
/// can see them.
struct ReducedNode : core::BackwardNode<ReducedNode, 4> {  // gradients of input, weight, bias; deferred scale
  const char* op = "";

  auto state() { return std::tie(op); }
  std::string name() const override { return op; }
  core::variable_list backward(core::variable_list&& grads) override;
};

/// Connects a loss. deferred_scale: see defer_scale().
inline void connect_reduced(
    const char* op, const at::Tensor& loss, torch::autograd::edge_list&& edges, const Gradients& gradients,
    const at::Tensor& deferred_scale) {
  auto node = core::make_node<ReducedNode>();
  node->op = op;
  node->set_next_edges(std::move(edges));
  node->save(gradients.input, gradients.weight, gradients.bias, deferred_scale);
  torch::autograd::set_history(loss, node);
}

}  // namespace liger::ops
