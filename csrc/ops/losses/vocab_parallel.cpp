// Aliases: vocab_parallel_<name>(...) is <name>(...) with the arguments `group` and `classes` after the tensors that
// are required, for code that was written before the operators themselves took them.

#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "core/registration.h"
#include "schemas.h"

namespace liger::ops {
namespace {

/// Calls the alias's operator with the arguments of the same names.
void call_by_name(const c10::OperatorHandle& handle, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto alias = std::find_if(std::begin(schemas::aliases), std::end(schemas::aliases), [&](const auto& each) {
    return handle.operator_name().name == core::qualified(each.name);
  });
  const c10::FunctionSchema& given = handle.schema();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(core::qualified(alias->op).c_str(), "");
  const auto arguments = torch::jit::last(*stack, given.arguments().size());
  torch::jit::Stack named;
  for (const c10::Argument& argument : op.schema().arguments()) {
    named.push_back(arguments[*given.argumentIndexWithName(argument.name())]);
  }
  torch::jit::drop(*stack, given.arguments().size());
  op.callBoxed(named);
  for (c10::IValue& result : named) stack->push_back(std::move(result));
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) {
  for (const schemas::Alias& alias : schemas::aliases) {
    core::define(m, alias.schema);
    m.impl(
        alias.name,
        torch::dispatch(
            c10::DispatchKey::CompositeImplicitAutograd, torch::CppFunction::makeFromBoxedFunction<call_by_name>()));
  }
}

}  // namespace liger::ops
