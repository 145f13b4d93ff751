// vocab_parallel_<name>(...): <name>(...) with the arguments `group` and `classes` after the tensors that are required.
// Aliases for code that was written before the operators themselves took them.

#include <torch/library.h>

#include <string>
#include <utility>

#include "core/registration.h"
#include "schemas.h"

namespace liger::ops {
namespace {

/// Calls the operator without the prefix, with the arguments of the same names.
void call_by_name(const c10::OperatorHandle& alias, c10::DispatchKeySet, torch::jit::Stack* stack) {
  constexpr size_t kPrefix = sizeof("liger::vocab_parallel_") - 1;
  const c10::FunctionSchema& given = alias.schema();
  const std::string name = "liger::" + alias.operator_name().name.substr(kPrefix);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
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

TORCH_LIBRARY_FRAGMENT(liger, m) {
  for (const char* schema :
       {schemas::vocab_parallel_cross_entropy, schemas::vocab_parallel_cross_entropy_with_metrics,
        schemas::vocab_parallel_fused_linear_cross_entropy,
        schemas::vocab_parallel_fused_linear_cross_entropy_with_metrics,
        schemas::vocab_parallel_fused_linear_cross_entropy_with_log_probs,
        schemas::vocab_parallel_fused_linear_divergence, schemas::vocab_parallel_fused_linear_log_probs}) {
    const c10::FunctionSchema parsed = torch::schema(schema);
    core::define(m, parsed);
    m.impl(
        parsed.name().c_str(),
        torch::dispatch(
            c10::DispatchKey::CompositeImplicitAutograd, torch::CppFunction::makeFromBoxedFunction<call_by_name>()));
  }
}

}  // namespace liger::ops
