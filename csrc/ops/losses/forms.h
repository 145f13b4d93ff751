#pragma once

// Losses whose classes may be split over the ranks of a process group. Each is two operators: the second one,
// vocab_parallel_<name>, takes the group and the number of all classes after the tensors that are required, and how
// classes and tokens are split after all options.
//
// A Family of such operators has, by their results R,
//   name<R>(is_split), schema<R>(is_split)
//   run<Device, R>(required..., options..., split...)     computes the results alone
//   with_graph<R>(required..., options..., split...)      the results, connected; std::nullopt if no argument requires a
//                                                         gradient
//   Cpu, Cuda, Meta, WholeAutocast, SplitAutocast         as in core::Operator

#include "core/operator.h"

namespace liger::ops {

template <class... T>
struct Types {};

template <class Op, class Family, class Type>
struct Form : core::Operator<Op, Type> {
  using Cpu = typename Family::Cpu;
  using Cuda = typename Family::Cuda;
  using Meta = typename Family::Meta;

  static void implement_autograd(torch::Library& m) { m.impl(Op::kOp, Op::autograd); }
};

template <class Family, class R, class Required, class Options>
struct Whole;

template <class Family, class R, class... Q, class... O>
struct Whole<Family, R, Types<Q...>, Types<O...>>
    : Form<Whole<Family, R, Types<Q...>, Types<O...>>, Family, R(Q..., O...)> {
  static constexpr const char *kOp = Family::template name<R>(false), *kSchema = Family::template schema<R>(false);
  using Autocast = typename Family::WholeAutocast;

  template <class Device>
  static R run(bool, Q... required, O... options) {
    return Family::template run<Device, R>(required..., options...);
  }

  static R autograd(Q... required, O... options) {
    if (auto out = Family::template with_graph<R>(required..., options...)) return *std::move(out);
    at::AutoDispatchBelowADInplaceOrView below;
    return Whole::handle().call(required..., options...);
  }
};

/// T: the types of how classes and tokens are split.
template <class Family, class R, class Required, class Options, class T>
struct Split;

template <class Family, class R, class... Q, class... O, class... T>
struct Split<Family, R, Types<Q...>, Types<O...>, Types<T...>>
    : Form<
          Split<Family, R, Types<Q...>, Types<O...>, Types<T...>>, Family,
          R(Q..., c10::string_view, int64_t, O..., T...)> {
  static constexpr const char *kOp = Family::template name<R>(true), *kSchema = Family::template schema<R>(true);
  using Autocast = typename Family::SplitAutocast;

  template <class Device>
  static R run(bool, Q... required, c10::string_view group, int64_t classes, O... options, T... split) {
    return Family::template run<Device, R>(required..., options..., group, classes, split...);
  }

  static R autograd(Q... required, c10::string_view group, int64_t classes, O... options, T... split) {
    if (auto out = Family::template with_graph<R>(required..., options..., group, classes, split...)) {
      return *std::move(out);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    return Split::handle().call(required..., group, classes, options..., split...);
  }
};

}  // namespace liger::ops
