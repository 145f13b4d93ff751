#pragma once

// Defines operators. implement() in memory.h registers their implementations.

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

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
inline void define_forward(torch::Library& m, const char* public_schema, size_t results) {
  const c10::FunctionSchema schema = torch::schema(public_schema);
  std::vector<c10::Argument> arguments;
  for (const c10::Argument& a : schema.arguments()) arguments.emplace_back(a.name(), a.type(), a.real_type(), a.N());
  const c10::Argument tensor("", c10::TensorType::get());
  define(m, {"_" + schema.name() + "_fwd", "", std::move(arguments), std::vector<c10::Argument>(results, tensor)});
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
