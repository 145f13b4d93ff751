#pragma once

// Defines operators. implement() in memory.h registers their implementations.

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

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
/// underscore. They run below autograd, but nested functorch transforms differentiate them again. That raises an error;
/// without it the gradients would be zeros, as for any operator without a derivative.
inline void define(torch::Library& m, const std::string& text) {
  c10::FunctionSchema schema = torch::schema(text.c_str());
  const std::string name = schema.name();
  const bool is_private = name[0] == '_' && detail::takes_tensors(schema);
  m.def(std::move(schema), {at::Tag::pt2_compliant_tag});
  if (is_private) {
    m.impl(
        name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback()));
  }
}

}  // namespace liger::core
