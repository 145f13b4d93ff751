// Private ops of the liger namespace, through which Python controls the runtime and reads its status.

#include <ATen/core/LegacyTypeDispatch.h>

#include "core/aten.h"
#include "core/autograd.h"
#include "core/registration.h"
#include "runtime/loader.h"
#include "runtime/status.h"

namespace liger {
namespace {

std::tuple<int64_t, int64_t> preload(int64_t device, std::vector<std::string> ops) {
  auto done = runtime::preload(int(device), ops);
  TORCH_CHECK(done.error.empty(), "preload: ", done.error);
  return {done.loaded, done.missing};
}

// Makes the op `liger::_compile_kernel`, which Python implements, the runtime's compile hook.
void enable_jit(std::string compiler) {
  runtime::set_compiler(compiler);
  runtime::set_compile_hook(
      [](const runtime::KernelSpec& spec, uint32_t variant, int capability, std::string& error) -> std::string {
        try {
          // The op has no tensor argument; modes and autograd must not see it.
          at::AutoDispatchBelowADInplaceOrView below;
          c10::impl::ExcludeDispatchKeyGuard modes(
              c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
          static const auto op = core::find_op<at::Tensor(std::string, int64_t, int64_t)>("_compile_kernel");
          at::Tensor bytes = op.call(spec.name, variant, capability).contiguous();
          return std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes());
        } catch (const std::exception& e) {
          error = e.what();
          return {};
        }
      });
}

}  // namespace

LIGER_LIBRARY_FRAGMENT(m) {
  m.def("_status() -> str", [] { return runtime::status(); });
  m.def("_reset_counts() -> ()", [] { runtime::reset_counts(); });
  m.def("_preload(int device, str[] ops) -> (int, int)", preload);
  m.def("_enable_jit(str compiler) -> ()", enable_jit);
  m.def("_compile_kernel(str kernel, int variant, int capability) -> Tensor");
}

}  // namespace liger
