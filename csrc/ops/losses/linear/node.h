#pragma once

// The backward node of losses of a linear head whose forward may compute the gradients.

#include <limits>
#include <string>

#include "core/operator.h"
#include "ops/losses/cross_entropy.h"  // whose kernel scales gradients
#include "ops/losses/linear/gradients.h"

namespace liger::ops::linear {

/// A dense tensor as few rows as possible, within the 32-bit columns of the scaling kernel.
inline at::Tensor as_long_rows(const at::Tensor& t) {
  at::Tensor flat = t.dim() == 2 && t.stride(0) == 1 ? t.t() : t;
  if (!flat.is_contiguous()) return t;
  if (flat.numel() < std::numeric_limits<int32_t>::max()) return flat.view({1, -1});
  return flat.view({-1, flat.size(-1)});
}

/// If forward has computed the gradients, multiplies them by the incoming gradient, on the device, at no cost if that
/// is 1; in place if nothing else can see them. Otherwise calls Again, a private operator, with the incoming gradient
/// and the arguments that the node keeps, of the types Kept. Again::kOp: the public operator.
template <class Self, class Again, class... Kept>
struct LinearNode : core::BackwardNode<Self, core::kAnyNumber> {
  bool has_gradients = false;
  std::tuple<typename core::Stored<Kept>::type...> kept;  // empty where the argument is a tensor

  auto state() { return std::tie(has_gradients, kept); }
  std::string name() const override { return Again::kOp; }

  /// gradients: undefined if forward has not computed them. deferred_scale: see defer_scale().
  void keep(const Gradients& gradients, const at::Tensor& deferred_scale, const Kept&... a) {
    const auto& [input, weight, bias, low_rank_input, low_rank_weight] = gradients;
    kept = {core::stored<Kept>(a)...};
    has_gradients = gradients.defined().any();
    if (has_gradients) return this->save_all({input, weight, bias, low_rank_input, low_rank_weight, deferred_scale});
    auto save = [&](const auto& value) {
      if constexpr (requires { core::SavedVariable(value, false); }) this->saved.emplace_back(value, false);
    };
    (save(a), ...);
  }

  core::variable_list backward(core::variable_list&& grads) override {
    const at::Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return core::variable_list(kGradients);
    return has_gradients ? scaled(grad) : computed(grad);
  }

 private:
  static constexpr size_t kGradients = 5, kLowRankInput = 3;

  core::variable_list scaled(const at::Tensor& grad) {
    core::variable_list out;
    const at::Tensor deferred_scale = this->take(kGradients);
    for (size_t i = 0; i < kGradients; ++i) {
      at::Tensor gradient = this->take(i);
      if (gradient.defined()) {
        const bool of_tokens = i == 0 || i == kLowRankInput;
        const at::Tensor factor = deferred_scale.defined() ? grad * deferred_scale.select(0, !of_tokens) : grad;
        const bool overwrites = this->may_overwrite(gradient, gradient);
        const at::Tensor from = overwrites ? as_long_rows(gradient) : gradient;
        const at::Tensor scaled = cross_entropy::Scale::call(overwrites, from, factor, name() + " backward");
        if (!overwrites) gradient = scaled;
      }
      out.push_back(std::move(gradient));
    }
    return out;
  }

  core::variable_list computed(const at::Tensor& grad) {
    size_t tensor = 0;
    auto argument = [&](const auto& option) {
      if constexpr (std::is_same_v<decltype(option), const std::tuple<>&>) {
        return this->take(tensor++);
      } else {
        return core::passed(std::get<0>(option));
      }
    };
    // Braces keep the order, in which the tensors were saved.
    auto arguments = std::apply([&](const auto&... each) { return std::tuple{argument(each)...}; }, kept);
    return std::apply(
        [&](const auto&... each) { return listed(Again::call(grad, each..., this->wanted())); }, arguments);
  }
};

}  // namespace liger::ops::linear
