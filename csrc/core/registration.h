#pragma once

// Defines operators, and registers their implementations with checks of all arguments that need no knowledge of the
// operator: tensors must have memory, and numbers must be finite, unless they may be None. Those are bounds, which may
// be infinite, and operators check them.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/memory.h"
#include "core/namespace.h"

namespace liger::core {
namespace detail {

inline bool takes_tensors(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    const auto& type = *argument.type();
    return type.isSubtypeOf(*c10::OptionalType::ofTensor()) || type.isSubtypeOf(*c10::ListType::ofTensors());
  });
}

}  // namespace detail

/// Defines an operator of torch.ops.liger. Private operators, which the public ones call, have names that begin with an
/// underscore. Those without a gradient run below autograd, but nested functorch transforms differentiate them again.
/// That raises an error; without it the gradients would be zeros, as for any operator without a derivative.
inline void define(torch::Library& m, c10::FunctionSchema schema, bool has_gradient = false) {
  const std::string name = schema.name();
  const bool refuses = name[0] == '_' && !has_gradient && detail::takes_tensors(schema);
  m.def(std::move(schema), {at::Tag::pt2_compliant_tag});
  if (refuses) {
    m.impl(
        name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
  }
}

inline void define(torch::Library& m, const std::string& text) { define(m, torch::schema(text.c_str())); }

/// Defines _<name>_fwd, which takes what the public operator takes, all of it by position, and returns more tensors.
inline void define_forward(torch::Library& m, const std::string& public_schema, size_t results) {
  const c10::FunctionSchema schema = torch::schema(public_schema.c_str());
  std::vector<c10::Argument> arguments;
  for (const c10::Argument& a : schema.arguments()) arguments.emplace_back(a.name(), a.type(), a.real_type(), a.N());
  const c10::Argument tensor("", c10::TensorType::get());
  define(m, {"_" + schema.name() + "_fwd", "", std::move(arguments), std::vector<c10::Argument>(results, tensor)});
}

namespace detail {

/// The operator's name in messages, e.g. rms_norm for _rms_norm_fwd.
inline std::string public_name(std::string op) {
  const size_t end = op.find_last_not_of('_') + 1;
  if (op[0] != '_' || end < 5) return op;
  const std::string half = op.substr(end - 4, 4), of = op.substr(1, end - 5);
  return half == "_fwd" ? of : half == "_bwd" ? of + " backward" : op;
}

/// An argument's name in the operator's schema, and its index in a list.
C10_NOINLINE inline std::string name_of(const std::string& op, size_t argument, const std::string& index = "") {
  const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow(qualified(op).c_str(), "").schema();
  return schema.arguments().at(argument).name() + index;
}

C10_NOINLINE inline void refuse_argument(
    const std::string& op, size_t argument, const std::string& index, const at::Tensor& t) {
  refuse_memory(public_name(op), name_of(op, argument, index), t);
}

C10_NOINLINE inline void refuse_argument(
    const std::string& op, size_t argument, const std::string& index, double number) {
  LIGER_CHECK(false, public_name(op), name_of(op, argument, index), "be finite", number);
}

template <class Op, class A>
void check_argument(const Op& op, size_t argument, const A& value) {
  if constexpr (std::is_same_v<A, at::Tensor>) {
    if (C10_UNLIKELY(!has_memory(value))) refuse_argument(op(), argument, "", value);
  } else if constexpr (std::is_same_v<A, std::optional<at::Tensor>>) {
    if (value && C10_UNLIKELY(!has_memory(*value))) refuse_argument(op(), argument, "", *value);
  } else if constexpr (std::is_same_v<A, at::TensorList>) {
    for (size_t i = 0; i < value.size(); ++i) {
      if (C10_UNLIKELY(!has_memory(value[i]))) refuse_argument(op(), argument, c10::str("[", i, "]"), value[i]);
    }
  } else if constexpr (std::is_same_v<A, c10::List<std::optional<at::Tensor>>>) {
    for (size_t i = 0; i < value.size(); ++i) {
      const std::optional<at::Tensor> t = value.get(i);
      if (t && C10_UNLIKELY(!has_memory(*t))) refuse_argument(op(), argument, c10::str("[", i, "]"), *t);
    }
  } else if constexpr (std::is_same_v<A, double>) {
    if (C10_UNLIKELY(!std::isfinite(value))) refuse_argument(op(), argument, "", value);
  } else if constexpr (std::is_same_v<A, at::ArrayRef<double>>) {
    for (size_t i = 0; i < value.size(); ++i) {
      if (C10_UNLIKELY(!std::isfinite(value[i]))) refuse_argument(op(), argument, c10::str("[", i, "]"), value[i]);
    }
  }
}

template <auto function, class F = decltype(function)>
struct Checked;

template <auto function, class R, class... A>
struct Checked<function, R (*)(A...)> {
  /// The operator's name. A function-local static, because registration may run before static members are initialised.
  static std::string& op() {
    static std::string name;
    return name;
  }

  static R run(A... arguments) {
    size_t i = 0;
    (check_argument(op, i++, arguments), ...);
    return function(std::forward<A>(arguments)...);
  }
};

}  // namespace detail

/// m.impl(op, function), with the checks above first. Each function implements one operator only.
template <auto function>
void implement(torch::Library& m, const std::string& op) {
  using Checked = detail::Checked<function>;
  std::string& name = Checked::op();
  TORCH_INTERNAL_ASSERT(name.empty() || name == op, op, " and ", name, " share a function");
  name = op;
  m.impl(op.c_str(), Checked::run);
}

}  // namespace liger::core

// torch's TORCH_LIBRARY_FRAGMENT and TORCH_LIBRARY_IMPL, for the operators' namespace.
#define LIGER_LIBRARY_FRAGMENT(m) LIGER_LIBRARY(FRAGMENT, std::nullopt, m, C10_UID)
#define LIGER_LIBRARY_IMPL(key, m) LIGER_LIBRARY(IMPL, c10::DispatchKey::key, m, C10_UID)
#define LIGER_LIBRARY(kind, key, m, uid)                                                                               \
  static void C10_CONCATENATE(liger_register_, uid)(torch::Library&);                                                  \
  static const torch::detail::TorchLibraryInit C10_CONCATENATE(liger_library_, uid)(                                   \
      torch::Library::kind, &C10_CONCATENATE(liger_register_, uid), liger::core::kNamespace, key, __FILE__, __LINE__); \
  void C10_CONCATENATE(liger_register_, uid)(torch::Library & m)
