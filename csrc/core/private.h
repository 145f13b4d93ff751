#pragma once

// Private operators, which the public ones call: below autograd, torch.compile, torch.export and DTensor see them.
// Their schemas follow from their C++ types.
//
// struct Op : core::Private<Op, R(A...)> has
//
//   kName            its name, which begins with an underscore; a function name() if it is put together
//   kArguments       the names of its arguments, "dy, x", with defaults if Python calls it: "x, seeds=None"
//   kPublic          the schema whose arguments from a to b, or from a on, "a...b" and "a..." in kArguments mean
//   run<Device>(a...)        checks what a wrong call would read or write beyond a tensor's memory
//
// With a third parameter, Overwrites<I...>, there is a second operator, `<name>_`, which writes its first results into
// the arguments at the positions I and returns the others. Its run<Device>(into, a...) computes both: into is an array
// with those arguments or, where results are new, undefined tensors. Overwritten arguments have the layout of their
// results, as BackwardNode::may_overwrite demands, and are always written, whatever `wanted` says.
//
// call(a...), or call(overwrite, a...), calls it through the dispatcher. An operator's `Privates` are registered with
// it.

#include <ATen/core/jit_type.h>

#include <array>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/autograd.h"
#include "core/registration.h"

namespace liger::core {

template <size_t... I>
using Overwrites = std::index_sequence<I...>;

namespace detail {

/// How a schema writes a type.
template <class T>
std::string written() {
  if constexpr (std::is_void_v<T>) {
    return "()";
  } else {
    return c10::getTypePtrCopy<std::decay_t<T>>()->str();
  }
}

/// "name(Tensor(a!) x, int n) -> Tensor", of types and the arguments' names. A reference that is not const is written
/// to.
template <class R, class... A>
std::string schema_of(const std::string& name, std::string_view names) {
  std::string out = name + "(";
  char alias = 'a';
  auto add = [&](std::string type, bool writes) {
    TORCH_INTERNAL_ASSERT(!names.empty(), name, " has more arguments than names");
    if (writes) type += std::string("(") + alias++ + "!)";
    const size_t end = std::min(names.find(", "), names.size());
    out += (out.back() == '(' ? "" : ", ") + type + " " + std::string(names.substr(0, end));
    names.remove_prefix(std::min(end + 2, names.size()));
  };
  (add(written<A>(), std::is_same_v<A, at::Tensor&>), ...);
  TORCH_INTERNAL_ASSERT(names.empty(), name, " has fewer arguments than names, without one: ", names);
  return out + ") -> " + written<R>();
}

/// kArguments, written out.
template <class Op>
std::string names_of() {
  std::string out = Op::kArguments;
  if constexpr (requires { Op::kPublic; }) {
    const c10::FunctionSchema all = torch::schema(Op::kPublic);
    for (size_t dots; (dots = out.find("...")) != std::string::npos;) {
      const size_t begin = out.rfind(' ', dots) + 1, end = std::min(out.find(", ", dots), out.size());
      const auto last = out.substr(dots + 3, end - dots - 3);
      std::string names;
      for (int i = *all.argumentIndexWithName(out.substr(begin, dots - begin)); i < int(all.arguments().size()); ++i) {
        names += (names.empty() ? "" : ", ") + all.arguments()[i].name();
        if (all.arguments()[i].name() == last) break;
      }
      out.replace(begin, end - begin, names);
    }
  }
  return out;
}

template <class Type>
struct Arguments;
template <class R, class... A>
struct Arguments<R(A...)> {
  using All = std::index_sequence_for<A...>;
};

/// The results of R but the first N: none, a tensor or a tuple.
template <size_t N, class R>
struct Rest;
template <>
struct Rest<1, at::Tensor> {
  using type = void;
  static void of(const at::Tensor&) {}
};
template <size_t N, class... R>
struct Rest<N, std::tuple<R...>> {
  using Count = std::make_index_sequence<sizeof...(R) - N>;

  template <size_t... I>
  static auto of(std::tuple<R...>&& all, std::index_sequence<I...>) {
    if constexpr (sizeof...(I) == 1) {
      return at::Tensor(std::get<N>(std::move(all)));
    } else if constexpr (sizeof...(I) > 1) {
      return std::make_tuple(std::get<N + I>(std::move(all))...);
    }
  }
  static auto of(std::tuple<R...>&& all) { return of(std::move(all), Count()); }

  using type = decltype(of(std::declval<std::tuple<R...>>()));
};

template <class Op, class Type, class Written, class All>
struct PrivatePair;

template <class Op, class R, class... A, size_t... W, size_t... I>
struct PrivatePair<Op, R(A...), std::index_sequence<W...>, std::index_sequence<I...>> {
  using Into = std::array<at::Tensor, sizeof...(W)>;

  static std::string name() { return Op::kName; }

  /// All results. Those that overwrite an argument are that argument.
  static R call(bool overwrites, A... a) {
    if (!overwrites) {
      static const auto op = find_op<R(A...)>(Op::name());
      return op.call(a...);
    }
    static const auto op = find_op<typename Others::type(Argument<I>...)>(Op::name() + "_");
    auto finish = [&](auto&&... others) {
      const auto given = std::forward_as_tuple(a...);
      return R(without_history(std::get<W>(given))..., std::forward<decltype(others)>(others)...);
    };
    if constexpr (std::is_void_v<typename Others::type>) {
      op.call(passed<I>(a)...);
      return finish();
    } else if constexpr (std::is_same_v<typename Others::type, at::Tensor>) {
      return finish(op.call(passed<I>(a)...));
    } else {
      return std::apply(finish, op.call(passed<I>(a)...));
    }
  }

  // ---- Registration

  static void define(torch::Library& m) {
    core::define(m, schema_of<R, A...>(Op::name(), names_of<Op>()));
    core::define(m, schema_of<typename Others::type, Argument<I>...>(Op::name() + "_", names_of<Op>()));
  }

  template <class Device>
  static void implement(torch::Library& m) {
    core::implement<fresh<Device>>(m, Op::name());
    core::implement<overwriting<Device>>(m, Op::name() + "_");
  }

 private:
  using Others = Rest<sizeof...(W), R>;

  template <size_t At>
  static constexpr bool is_written = ((At == W) || ...);
  template <size_t At>
  using Argument = std::conditional_t<is_written<At>, at::Tensor&, std::tuple_element_t<At, std::tuple<A...>>>;

  template <size_t At, class T>
  static Argument<At> passed(const T& value) {
    if constexpr (is_written<At>) {
      return const_cast<at::Tensor&>(value);
    } else {
      return value;
    }
  }

  /// A saved tensor has the history of forward.
  static at::Tensor without_history(const at::Tensor& t) { return t.requires_grad() ? t.detach() : t; }

  template <class Device>
  static R fresh(A... a) {
    return Op::template run<Device>(Into{}, a...);
  }
  template <class Device>
  static typename Others::type overwriting(Argument<I>... a) {
    const auto given = std::forward_as_tuple(a...);
    return Others::of(Op::template run<Device>(Into{std::get<W>(given)...}, a...));
  }
};

}  // namespace detail

template <class Op, class Type, class Written = Overwrites<>>
struct Private : detail::PrivatePair<Op, Type, Written, typename detail::Arguments<Type>::All> {};

template <class Op, class R, class... A>
struct Private<Op, R(A...), Overwrites<>> {
  static std::string name() { return Op::kName; }

  static R call(A... a) {
    static const auto op = find_op<R(A...)>(Op::name());
    return op.call(std::forward<A>(a)...);
  }

  static void define(torch::Library& m) {
    core::define(m, detail::schema_of<R, A...>(Op::name(), detail::names_of<Op>()));
  }

  template <class Device>
  static void implement(torch::Library& m) {
    core::implement<run<Device>>(m, Op::name());
  }

 private:
  template <class Device>
  static R run(A... a) {
    return Op::template run<Device>(std::forward<A>(a)...);
  }
};

/// Of an operator, in the order of their definition.
template <class... Op>
struct Privates {
  static void define(torch::Library& m) { (Op::define(m), ...); }

  template <class Device>
  static void implement(torch::Library& m) {
    (Op::template implement<Device>(m), ...);
  }
};

}  // namespace liger::core
