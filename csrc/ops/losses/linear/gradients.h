#pragma once

// The gradients of a linear head: which are wanted, their memory, and how private operators and nodes pass them on.

#include <cmath>
#include <tuple>

#include "core/aten.h"
#include "core/autograd.h"

namespace liger::ops::linear {

/// 1 / total, and 0 for 0: without anything to divide by, gradients are 0 and not 0 / 0.
inline at::Tensor inverse_or_zero(const at::Tensor& total) {
  return at::where(total == 0, at::zeros_like(total), total.reciprocal());
}

/// fp16 cannot represent small gradients, so forward scales those of the head itself down by a power of two. Fills
/// the factors that backward applies, (of the tokens' gradients, of the head's), and returns that power. inverse:
/// another factor for both, if defined.
inline double defer_scale(at::Tensor& factors, int64_t tokens, const at::Tensor& inverse) {
  int64_t halvings = 0;
  while ((int64_t(1) << (2 * halvings)) < tokens) ++halvings;
  factors.select(0, 0).fill_(1);
  factors.select(0, 1).fill_(std::ldexp(1.0, int(halvings)));
  if (inverse.defined()) factors.mul_(inverse);
  return std::ldexp(1.0, -int(halvings));
}

/// Gradients that a call computes.
struct WantedGradients {
  bool input = false, weight = false, bias = false, low_rank_input = false, low_rank_weight = false;

  /// Any but that of input.
  constexpr bool head() const { return weight || bias || low_rank_input || low_rank_weight; }
  constexpr bool any() const { return input || head(); }

  constexpr int64_t bits() const { return core::wanted_bits(input, weight, bias, low_rank_input, low_rank_weight); }
  static constexpr WantedGradients from_bits(int64_t bits) {
    auto has = [&](int gradient) { return core::wants(bits, gradient); };
    return {has(0), has(1), has(2), has(3), has(4)};
  }
};

/// The tensors of a linear head that can require gradients. Those that are not given are undefined.
struct HeadTensors {
  at::Tensor input, weight, bias, low_rank_input, low_rank_weight;

  auto tie() { return std::tie(input, weight, bias, low_rank_input, low_rank_weight); }

  /// Those for which f is true.
  template <class F>
  WantedGradients where(const F& f) const {
    return {f(input), f(weight), f(bias), f(low_rank_input), f(low_rank_weight)};
  }
  WantedGradients defined() const {
    return where([](const at::Tensor& t) { return t.defined(); });
  }
};

/// Their gradients. Those that are not wanted are undefined.
using Gradients = HeadTensors;

/// Memory for the gradients of these tensors.
inline Gradients empty_gradients(const HeadTensors& of, WantedGradients wanted) {
  auto like = [](bool wanted, const at::Tensor& t, at::MemoryFormat format = at::MemoryFormat::Contiguous) {
    return wanted ? at::empty_like(t, t.options().memory_format(format)) : at::Tensor();
  };
  return {
      like(wanted.input, of.input), like(wanted.weight, of.weight, at::MemoryFormat::Preserve),
      like(wanted.bias, of.bias), like(wanted.low_rank_input, of.low_rank_input),
      like(wanted.low_rank_weight, of.low_rank_weight)};
}

/// The tensors that a tie() lists, as private operators return them.
template <class... T>
std::tuple<T...> copies(const std::tuple<T&...>& tensors) {
  return tensors;
}
using FiveGradients = decltype(copies(Gradients().tie()));

/// The same as backward nodes return them.
inline core::variable_list listed(FiveGradients&& gradients) {
  return std::apply([](auto&... each) { return core::variable_list{std::move(each)...}; }, gradients);
}

/// The bits of WantedGradients for those of the arguments at these positions that require a gradient.
template <size_t... Edge, class... A>
int64_t required(std::index_sequence<Edge...>, const A&... a) {
  auto requires_grad = [](const std::optional<at::Tensor>& t) { return t && t->requires_grad(); };
  return core::wanted_bits(requires_grad(std::get<Edge>(std::tie(a...)))...);
}

}  // namespace liger::ops::linear
