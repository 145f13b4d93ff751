#pragma once

// Loads kernels from packs, from the JIT's disk cache or through the compile hook.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/export.h"
#include "runtime/kernel.h"
#include "runtime/pack.h"

namespace liger::runtime {

struct Failure {
  std::string why;
  bool transient = false;  // caused by the device or the process, not by the binary
};

/// Null, with the reason in `failure`, if no source has a binary that the driver accepts. compile: also try sources
/// that need to compile.
const Function* load(Kernel& kernel, uint32_t variant, int device, bool compile, Failure& failure);

/// NotNow: a transient error, caused by the device or the process and not by the binary.
enum class Loads { Yes, No, NotNow };
/// Loads a variant if necessary. For callers that have another way without it: the log contains the reason for a
/// failure.
LIGER_RUNTIME_API Loads loads(Kernel& kernel, uint32_t variant, int device);

/// For developer tools. Operators use this config (bytes of the kernel's Config) instead of one of the table's
/// `configs` until set_trial(nullptr). They launch the kernels that the pack holds under the numbers of that config's
/// `variants`, which differ in their points. Empty on success.
LIGER_RUNTIME_API std::string try_config(
    Kernel& kernel, int device, const std::string& config, uint32_t configs, const std::vector<uint32_t>& variants,
    const std::string& pack);

struct Preloaded {
  uint32_t loaded = 0, missing = 0;
  std::string error;
};
/// Loads every variant that a pack or the disk cache holds. `missing` variants wait for the compile hook at first use.
/// Stops with an error if the device or the process has one.
/// `ops` limits it to the kernels that these operators launch.
LIGER_RUNTIME_API Preloaded preload(int device, const std::vector<std::string>& ops);
/// The kernels that these operators launch; all kernels if `ops` is empty. `error` is set if an operator is unknown.
LIGER_RUNTIME_API std::vector<Kernel*> kernels_of(const std::vector<std::string>& ops, std::string& error);

/// Compiles a variant for a capability. Returns a single-entry pack, or an empty string with `error` set.
using CompileHook = std::function<std::string(const KernelSpec&, uint32_t variant, int capability, std::string& error)>;
LIGER_RUNTIME_API void set_compile_hook(CompileHook hook);
bool has_compile_hook();
/// Name and version of the hook's compiler, which is part of the disk cache's key.
LIGER_RUNTIME_API void set_compiler(const std::string& compiler);
/// False if LIGER_OPS_JIT=0.
LIGER_RUNTIME_API bool jit_enabled();
LIGER_RUNTIME_API std::string jit_cache_directory();

/// $LIGER_OPS_PACK_DIR, or `packs` next to the folder that holds this library.
LIGER_RUNTIME_API std::string pack_directory();
/// All readable packs of that folder, opened at the first call.
const std::vector<std::unique_ptr<Pack>>& packs();

/// The path that a kernel's first launch would take. This is a prediction, because nothing is loaded.
const char* path_of(const Kernel& kernel, const Device& device);

}  // namespace liger::runtime
