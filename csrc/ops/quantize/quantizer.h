#pragma once

#include "core/operator.h"

namespace liger::ops::quantize {

/// x must not require a gradient, so that nothing is ever saved.
template <class Op, class Type>
struct Operator : core::Operator<Op, Type> {
  using Edges = core::Positions<>;
  using Constants = core::Positions<0>;
  using Saves = core::Saves<>;
  using Differentiable = core::Positions<>;

  template <class Node>
  static core::variable_list backward(Node&, core::variable_list&&) {
    return {};
  }
};

}  // namespace liger::ops::quantize
