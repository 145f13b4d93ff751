// The liger namespace: the private ops through which Python sees and feeds the runtime.

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>

#include "core/autograd.h"
#include "runtime/runtime.h"

namespace liger {
namespace {

std::tuple<int64_t, int64_t> preload(int64_t device, std::vector<std::string> ops) {
  auto done = runtime::preload(int(device), ops);
  TORCH_CHECK(done.error.empty(), "preload: ", done.error);
  return {done.loaded, done.missing};
}

// Registers the op `liger::_compile_kernel`, which Python implements, as the runtime's compile hook.
void enable_jit(std::string compiler) {
  runtime::set_compiler(compiler);
  runtime::set_compile_hook(
      [](const runtime::KernelSpec& spec, uint32_t variant, int capability, std::string& error) -> std::string {
        try {
          // The op has no tensor argument; modes and autograd must not see it.
          at::AutoDispatchBelowADInplaceOrView below;
          c10::impl::ExcludeDispatchKeyGuard modes(
              c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
          static const auto op = core::find_op<at::Tensor(std::string, int64_t, int64_t)>("liger::_compile_kernel");
          at::Tensor bytes = op.call(spec.name, variant, capability).contiguous();
          return std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
        } catch (const std::exception& e) {
          error = e.what();
          return {};
        }
      });
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    const auto& type = *argument.type();
    return type.isSubtypeOf(*c10::OptionalType::ofTensor()) || type.isSubtypeOf(*c10::ListType::ofTensors());
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(liger, m) {
  m.def("_status() -> str", [] { return runtime::status(); });
  m.def("_reset_counts() -> ()", [] { runtime::reset_counts(); });
  m.def("_preload(int device, str[] ops) -> (int, int)", preload);
  m.def("_enable_jit(str compiler) -> ()", enable_jit);
  m.def("_compile_kernel(str kernel, int variant, int capability) -> Tensor");
}

// The halves that public ops are made of run below autograd, but nested functorch transforms differentiate them once
// more: an error then, and not the zeros of an op without a derivative. This file is linked last, so it sees them all.
TORCH_LIBRARY_IMPL(liger, Autograd, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind("liger::_", 0) != 0 || !op || !takes_tensors(op->schema())) continue;
    m.impl(name.name.c_str(), torch::autograd::autogradNotImplementedFallback());
  }
}

}  // namespace liger
