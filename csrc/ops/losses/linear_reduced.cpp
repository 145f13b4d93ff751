#include "ops/losses/linear_reduced.h"

#include <limits>

namespace liger::ops {
namespace {

using at::Tensor;

/// A dense tensor as few rows as possible, within the 32-bit columns of the scaling kernel.
Tensor as_long_rows(const Tensor& t) {
  Tensor flat = t.dim() == 2 && t.stride(0) == 1 ? t.t() : t;
  if (!flat.is_contiguous()) return t;
  if (flat.numel() < std::numeric_limits<int32_t>::max()) return flat.view({1, -1});
  return flat.view({-1, flat.size(-1)});
}

Tensor scaled(const std::string& op_name, const Tensor& gradient, const Tensor& factor, bool overwrite) {
  using Function = Tensor(const Tensor&, const Tensor&, c10::string_view);
  using InPlace = void(Tensor&, const Tensor&, c10::string_view);
  if (!overwrite) {
    static const auto op = core::find_op<Function>("liger::_cross_entropy_scale");
    return op.call(gradient, factor, op_name);
  }
  static const auto op = core::find_op<InPlace>("liger::_cross_entropy_scale_");
  Tensor flat = as_long_rows(gradient);
  op.call(flat, factor, op_name);
  return gradient;
}

}  // namespace

core::variable_list ReducedNode::backward(core::variable_list&& grads) {
  Tensor grad = std::move(grads[0]);
  if (!grad.defined()) return {Tensor(), Tensor(), Tensor()};
  core::variable_list out;
  Tensor deferred_scale = take(3);
  for (size_t i = 0; i < 3; ++i) {
    Tensor gradient = take(i);
    if (gradient.defined()) {
      Tensor factor = deferred_scale.defined() ? grad * deferred_scale.select(0, i > 0) : grad;
      gradient = scaled(name() + " backward", gradient, factor, may_overwrite(gradient, gradient));
    }
    out.push_back(std::move(gradient));
  }
  return out;
}

}  // namespace liger::ops
