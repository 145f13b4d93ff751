#pragma once

// Operators with a gradient, each described once. From the description follow the operator's implementation on every
// device, its Autograd and Autocast implementations, and all registrations.
//
// struct Op : core::Operator<Op, R(A...)>, where R(A...) is the operator's C++ type, has
//
//   kOp, kSchema               its name and its public schema; a private one has kArguments instead, as in private.h
//   Edges                      Positions of the arguments that can require a gradient, in the order of Node's results
//   Constants                  Positions of those that must not, none by default
//   Forward                    what run() returns: the results in R, then what only backward needs. R by default.
//   run<Device>(save, a...)    computes. Without `save`, it need not compute what only backward needs.
//   Saves, Differentiable      what the backward node saves, and the positions of the differentiable results
//   backward(node, grads)      the gradients of Edges. node.options: the arguments that are not tensors.
//   Node                       a node of its own instead of Saves, Differentiable and backward. Its record(out, a...)
//                              saves tensors and connects results; its member `options`, if any, holds what are no
//                              tensors.
//   run_forward(a...)          calls what returns more than the public operator, by default `_<name>_fwd`, see below
//   Privates                   its private operators, which backward calls; none by default
//   Autocast                   casts of arguments, NoAutocast by default
//
// LIGER_OPERATOR(Op) registers it for the devices Op::Cpu, Op::Cuda and Op::Meta. If Forward is not R, it has a private
// operator `_<name>_fwd`, which torch.compile, torch.export and selective checkpointing see.

#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/aten.h"
#include "core/autocast.h"
#include "core/autograd.h"
#include "core/private.h"
#include "core/registration.h"
#include "runtime/interpreter.h"
#include "schemas.h"

namespace liger::core {

template <size_t... I>
using Positions = std::index_sequence<I...>;

/// Where an argument stands in a schema.
consteval size_t position(std::string_view schema, std::string_view name) {
  schema.remove_prefix(schema.find('(') + 1);
  for (size_t at = 0;; ++at) {
    if (schema.starts_with("*, ")) schema.remove_prefix(3);
    const size_t end = std::min(schema.find(", "), schema.find(") ->"));
    std::string_view argument = schema.substr(0, end);
    argument = argument.substr(0, argument.find('='));
    if (argument.substr(argument.rfind(' ') + 1) == name) return at;
    schema.remove_prefix(end + 2);
  }
}

/// Entries of Saves: an argument, or one of what run() returned.
template <size_t I>
struct Argument {
  template <class Arguments, class Results>
  static const auto& of(const Arguments& arguments, const Results&) {
    return std::get<I>(arguments);
  }
};
template <size_t I>
struct Result {
  template <class Arguments, class... T>
  static const at::Tensor& of(const Arguments&, const std::tuple<T...>& results) {
    return std::get<I>(results);
  }
  template <class Arguments>
  static const at::Tensor& of(const Arguments&, const at::Tensor& result) {
    return result;
  }
};
template <class... Entry>
struct Saves {
  static constexpr size_t kCount = sizeof...(Entry);

  template <class Node, class Arguments, class Results>
  static void save(Node& node, const Arguments& arguments, const Results& results) {
    node.save(Entry::of(arguments, results)...);
  }
};

/// Casts no argument.
struct NoAutocast {
  static constexpr bool kCpu = false, kCuda = false;
};

/// Casts the arguments at these positions as those of a linear layer.
template <size_t... I>
struct AutocastLinear {
  static constexpr bool kCpu = true, kCuda = true;

  template <class Arguments>
  static void cast(c10::DeviceType device, Arguments& arguments) {
    (cast_one(device, std::get<I>(arguments)), ...);
  }

 private:
  static void cast_one(c10::DeviceType device, at::Tensor& t) { t = autocast_to_lower(t, device); }
  static void cast_one(c10::DeviceType device, std::optional<at::Tensor>& t) {
    if (t && t->defined()) cast_one(device, *t);
  }
  static void cast_one(c10::DeviceType device, std::vector<at::Tensor>& list) {
    for (auto& t : list) cast_one(device, t);
  }
};

/// Casts the arguments at these positions to the widest of their dtypes, as arithmetic does.
template <size_t... I>
struct AutocastPromote {
  static constexpr bool kCpu = true, kCuda = true;

  template <class Arguments>
  static void cast(c10::DeviceType, Arguments& arguments) {
    at::ScalarType wide = at::ScalarType::Undefined;
    auto widen = [&](at::ScalarType dtype) {
      wide = wide == at::ScalarType::Undefined ? dtype : at::promote_types(wide, dtype);
    };
    (widen(std::get<I>(arguments).scalar_type()), ...);
    ((std::get<I>(arguments) = std::get<I>(arguments).to(wide)), ...);
  }
};

/// How a node stores an argument. Tensors are not among its options.
template <class T>
struct Stored {
  using type = std::tuple<std::decay_t<T>>;
};
template <>
struct Stored<const at::Tensor&> {
  using type = std::tuple<>;
};
template <>
struct Stored<const std::optional<at::Tensor>&> {
  using type = std::tuple<>;
};
template <>
struct Stored<at::TensorList> {
  using type = std::tuple<>;
};
template <>
struct Stored<const c10::List<std::optional<at::Tensor>>&> {
  using type = std::tuple<>;
};
template <>
struct Stored<at::ArrayRef<double>> {
  using type = std::tuple<std::vector<double>>;
};
template <>
struct Stored<at::IntArrayRef> {
  using type = std::tuple<std::vector<int64_t>>;
};
template <>
struct Stored<c10::string_view> {
  using type = std::tuple<std::string>;
};
template <>
struct Stored<at::OptionalIntArrayRef> {
  using type = std::tuple<std::optional<std::vector<int64_t>>>;
};

template <class T>
typename Stored<T>::type stored(const T& value) {
  if constexpr (std::tuple_size_v<typename Stored<T>::type> == 0) {
    return {};
  } else if constexpr (std::is_same_v<T, at::OptionalIntArrayRef>) {
    return {value ? std::optional(value->vec()) : std::nullopt};
  } else if constexpr (std::is_same_v<T, at::ArrayRef<double>> || std::is_same_v<T, at::IntArrayRef>) {
    return {value.vec()};
  } else {
    return typename Stored<T>::type(value);
  }
}

/// A stored argument, for a call.
template <class T>
const T& passed(const T& value) {
  return value;
}
inline at::OptionalIntArrayRef passed(const std::optional<std::vector<int64_t>>& value) {
  return value ? at::OptionalIntArrayRef(*value) : std::nullopt;
}

namespace detail {

template <class T>
struct Count : std::integral_constant<size_t, 1> {};
template <class... T>
struct Count<std::tuple<T...>> : std::integral_constant<size_t, sizeof...(T)> {};

template <class R, class All, size_t... I>
R leading(All&& all, std::index_sequence<I...>) {
  return R(std::get<I>(std::forward<All>(all))...);
}

}  // namespace detail

/// The first results of `all`, as many as R has.
template <class R, class All>
R leading(All&& all) {
  if constexpr (std::is_same_v<R, std::decay_t<All>>) {
    return std::forward<All>(all);
  } else {
    return detail::leading<R>(std::forward<All>(all), std::make_index_sequence<detail::Count<R>::value>());
  }
}

namespace detail {

template <class T>
void check_dense_argument(const char* op, size_t argument, const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (C10_UNLIKELY(value.layout() != at::kStrided || value.is_quantized())) {
      check_dense(public_name(op).c_str(), name_of(op, argument).c_str(), value);
    }
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    if (value && value->defined()) check_dense_argument(op, argument, *value);
  } else if constexpr (std::is_same_v<T, at::TensorList>) {
    for (const auto& t : value) check_dense_argument(op, argument, t);
  }
}

template <class T>
void check_constant(const char* op, size_t argument, const T& value) {
  if (C10_UNLIKELY(torch::autograd::compute_requires_grad(value))) {
    LIGER_CHECK(false, op, name_of(op, argument), "not require a gradient", "one that does");
  }
}

template <class Node, class = void>
constexpr bool has_options = false;
template <class Node>
constexpr bool has_options<Node, std::void_t<decltype(std::declval<Node&>().options)>> = true;

struct TensorVector : std::vector<at::Tensor> {
  TensorVector(at::TensorList list) : std::vector<at::Tensor>(list.begin(), list.end()) {}
};

/// A copy of an argument that Autocast may replace.
template <class T>
struct Replaceable {
  using type = T;
};
template <>
struct Replaceable<const at::Tensor&> {
  using type = at::Tensor;
};
template <>
struct Replaceable<const std::optional<at::Tensor>&> {
  using type = std::optional<at::Tensor>;
};
template <>
struct Replaceable<at::TensorList> {
  using type = TensorVector;
};

}  // namespace detail

/// Calls f with a node's options.
template <class Options, class F>
auto with_options(const Options& options, const F& f) {
  return std::apply([&](const auto&... each) { return f(passed(each)...); }, options);
}

template <class Op, class Type>
struct Operator;

template <class Op>
struct OperatorNode : BackwardNode<OperatorNode<Op>, Op::Saves::kCount> {
  typename Op::Options options;

  auto state() { return std::tie(options); }
  std::string name() const override { return Op::kOp; }

  template <class Forward, class... A>
  void record(const Forward& out, const A&... a) {
    Op::Saves::save(*this, std::tie(a...), out);
    connect_results(out, typename Op::Differentiable());
  }

  variable_list backward(variable_list&& grads) override { return Op::backward(*this, std::move(grads)); }

 private:
  template <class Forward, size_t... I>
  void connect_results(const Forward& out, Positions<I...>) {
    this->connect(Result<I>::of(std::tuple<>(), out)...);
  }
};

template <class Op, class Return, class... A>
struct Operator<Op, Return(A...)> {
  using Type = Return(A...);
  using R = Return;
  using Forward = Return;
  using Constants = Positions<>;
  using Autocast = NoAutocast;
  using Differentiable = Positions<0>;
  using Options = decltype(std::tuple_cat(std::declval<typename Stored<A>::type>()...));
  using Node = OperatorNode<Op>;
  using Privates = core::Privates<>;

  /// The public operator below autograd and autocast.
  template <class Device>
  static R apply(A... a) {
    return leading<R>(Op::template run<Device>(false, a...));
  }

  /// _<name>_fwd
  template <class Device>
  static auto forward(A... a) {
    return Op::template run<Device>(true, a...);
  }

  static const auto& handle() {
    static const auto op = find_op<Type>(Op::kOp);
    return op;
  }

  /// What autograd calls if a gradient is needed.
  static auto run_forward(A... a) {
    at::AutoDispatchBelowADInplaceOrView below;
    if constexpr (has_forward()) {
      static const auto op = find_op<typename Op::Forward(A...)>(private_name("_fwd"));
      return op.call(a...);
    } else {
      return handle().call(a...);
    }
  }

  /// What autograd checks first: tensors are dense, and those that must not have a gradient need none.
  static void check_tensors(const A&... a) {
    size_t i = 0;
    (detail::check_dense_argument(Op::kOp, i++, a), ...);
    check_gradients(std::tie(a...), typename Op::Edges(), typename Op::Constants());
  }

  static R autograd(A... a) {
    check_tensors(a...);
    const auto arguments = std::tie(a...);
    if (!requires_gradient(arguments, typename Op::Edges())) {
      at::AutoDispatchBelowADInplaceOrView below;
      return handle().call(a...);
    }
    auto out = Op::run_forward(a...);
    auto node = make_node<typename Op::Node>();
    node->set_next_edges(edges(arguments, typename Op::Edges()));
    if constexpr (detail::has_options<typename Op::Node>) node->options = std::tuple_cat(stored<A>(a)...);
    node->record(out, a...);
    return leading<R>(std::move(out));
  }

  template <c10::DeviceType kDevice>
  static R autocast(A... a) {
    c10::impl::ExcludeDispatchKeyGuard below(autocast_key(kDevice));
    std::tuple<typename detail::Replaceable<A>::type...> arguments(a...);
    Op::Autocast::cast(kDevice, arguments);
    return std::apply([](auto&... replaced) { return handle().call(replaced...); }, arguments);
  }

  // ---- Registration

  static std::string schema() {
    if constexpr (requires { Op::kSchema; }) {
      return Op::kSchema;
    } else {
      return detail::schema_of<R, A...>(Op::kOp, Op::kArguments);
    }
  }

  static constexpr bool has_forward() { return !std::is_same_v<typename Op::Forward, R>; }

  static void define(torch::Library& m) {
    core::define(m, torch::schema(Op::schema().c_str()), /*has_gradient=*/true);
    if constexpr (has_forward()) define_forward(m, Op::schema(), detail::Count<typename Op::Forward>::value);
    Op::Privates::define(m);
  }

  template <class Device>
  static void implement(torch::Library& m) {
    core::implement<apply<Device>>(m, Op::kOp);
    if constexpr (has_forward()) core::implement<forward<Device>>(m, private_name("_fwd"));
    Op::Privates::template implement<Device>(m);
  }

  static void implement_autograd(torch::Library& m) { m.impl(Op::kOp, autograd); }

  template <c10::DeviceType kDevice>
  static void implement_autocast(torch::Library& m) {
    constexpr bool casts = kDevice == c10::DeviceType::CPU ? Op::Autocast::kCpu : Op::Autocast::kCuda;
    if constexpr (casts) core::implement<autocast<kDevice>>(m, Op::kOp);
  }

  static std::string private_name(const char* suffix) { return std::string("_") + Op::kOp + suffix; }

 private:
  template <class Arguments, size_t... E, size_t... C>
  static void check_gradients(const Arguments& a, Positions<E...>, Positions<C...>) {
    check_no_forward_ad(Op::kOp, std::get<E>(a)..., std::get<C>(a)...);
    (detail::check_constant(Op::kOp, C, std::get<C>(a)), ...);
  }

  template <class Arguments, size_t... E>
  static bool requires_gradient(const Arguments& a, Positions<E...>) {
    return torch::autograd::compute_requires_grad(std::get<E>(a)...);
  }

  template <class Arguments, size_t... E>
  static auto edges(const Arguments& a, Positions<E...>) {
    return torch::autograd::collect_next_edges(std::get<E>(a)...);
  }
};

/// With the CUDA code, if kernels run in an interpreter.
template <class Op>
void implement_on_cpu(torch::Library& m) {
  if (runtime::interprets()) {
    Op::template implement<typename Op::Cuda>(m);
  } else {
    Op::template implement<typename Op::Cpu>(m);
  }
}

}  // namespace liger::core

#define LIGER_OPERATOR(Op)                                                                           \
  LIGER_LIBRARY_FRAGMENT(m) { Op::define(m); }                                                       \
  LIGER_LIBRARY_IMPL(CPU, m) { liger::core::implement_on_cpu<Op>(m); }                               \
  LIGER_LIBRARY_IMPL(CUDA, m) { Op::implement<Op::Cuda>(m); }                                        \
  LIGER_LIBRARY_IMPL(Meta, m) { Op::implement<Op::Meta>(m); }                                        \
  LIGER_LIBRARY_IMPL(Autograd, m) { Op::implement_autograd(m); }                                     \
  LIGER_LIBRARY_IMPL(AutocastCUDA, m) { Op::template implement_autocast<c10::DeviceType::CUDA>(m); } \
  LIGER_LIBRARY_IMPL(AutocastCPU, m) { Op::template implement_autocast<c10::DeviceType::CPU>(m); }
