// The runtime for callers that have neither torch's ABI nor pybind11: the Python registration reaches it by ctypes.
// Functions that can fail return null or 0 on success and otherwise a message, which lives until the thread's next call.

#include <cstring>
#include <string>

#include "runtime/launch.h"
#include "runtime/loader.h"
#include "runtime/status.h"

using namespace liger::runtime;

namespace {

thread_local std::string answer;

const char* say(std::string text) {
  answer = std::move(text);
  return answer.c_str();
}

}  // namespace

extern "C" {

// Writes the compiled pack through `reply(bytes, size)`, or an error through it with size -1.
using LigerReply = void (*)(const char* bytes, int64_t size, void* context);
using LigerHook = void (*)(const char* kernel, uint32_t variant, int capability, LigerReply reply, void* context);

LIGER_RUNTIME_API const char* liger_launch(
    const char* name, uint32_t variant, int device, void* stream, uint32_t x, uint32_t y, uint32_t z, const void* args,
    uint64_t args_bytes) {
  Kernel* kernel = Kernel::find(name);
  if (!kernel) return say(std::string("no kernel named ") + name);
  if (!kernel->spec().has_variant(variant) || args_bytes != kernel->spec().args_bytes) {
    return say(
        std::string(name) + ": the kernel tables of the Python files and of the library differ; rebuild liger-ops");
  }
  std::string error = launch(*kernel, variant, device, stream, {x, y, z}, args);
  return error.empty() ? nullptr : say(std::move(error));
}

LIGER_RUNTIME_API int liger_multiprocessors(int device) { return multiprocessors(device); }

LIGER_RUNTIME_API const char* liger_status() { return say(status()); }

LIGER_RUNTIME_API void liger_reset_counts() { reset_counts(); }

LIGER_RUNTIME_API void liger_count_cpu_call() { count_cpu_call(); }

LIGER_RUNTIME_API const char* liger_preload(
    int device, const char* const* ops, int count, int64_t* loaded, int64_t* missing) {
  Preloaded done = preload(device, std::vector<std::string>(ops, ops + count));
  *loaded = done.loaded;
  *missing = done.missing;
  return done.error.empty() ? nullptr : say(done.error);
}

LIGER_RUNTIME_API void liger_set_compile_hook(const char* compiler, LigerHook hook) {
  set_compiler(compiler);
  set_compile_hook([hook](const KernelSpec& spec, uint32_t variant, int capability, std::string& error) {
    struct Reply {
      std::string bytes, error;
    } reply;
    hook(
        spec.name, variant, capability,
        [](const char* bytes, int64_t size, void* context) {
          auto& out = *static_cast<Reply*>(context);
          size < 0 ? out.error.assign(bytes) : out.bytes.assign(bytes, size);
        },
        &reply);
    error = reply.error;
    return reply.bytes;
  });
}

}  // extern "C"
