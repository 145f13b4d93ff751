#pragma once

// Operators that one family of functions implements, and that differ in their results R. A Family has, for all of them,
//
//   Cpu, Cuda, Meta, Autocast   as in core::Operator
//   name<R>(), schema<R>()
//   run<Device, R>(a...)        computes the results alone
//   with_graph<R>(a...)         the results, connected; std::nullopt if no argument requires a gradient

#include "core/operator.h"

namespace liger::ops {

template <class Family, class R, class... A>
struct Form : core::Operator<Form<Family, R, A...>, R(A...)> {
  using Cpu = typename Family::Cpu;
  using Cuda = typename Family::Cuda;
  using Meta = typename Family::Meta;
  using Autocast = typename Family::Autocast;
  static constexpr const char *kOp = Family::template name<R>(), *kSchema = Family::template schema<R>();

  template <class Device>
  static R run(bool, A... a) {
    return Family::template run<Device, R>(a...);
  }

  static R autograd(A... a) {
    if (auto out = Family::template with_graph<R>(a...)) return *std::move(out);
    at::AutoDispatchBelowADInplaceOrView below;
    return Form::handle().call(a...);
  }

  static void implement_autograd(torch::Library& m) { m.impl(kOp, autograd); }
};

}  // namespace liger::ops
