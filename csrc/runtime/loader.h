#pragma once

// From a kernel's name to a function of the driver: packs, the JIT's disk cache, the compile hook.

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
  bool may_pass = false;  // of the device or the process, not of the binary
};

/// Null, and `failure` says why, if no source has a binary that the driver takes. compile: also if that takes a compiler.
const Function* load(Kernel& kernel, uint32_t variant, int device, bool compile, Failure& failure);

/// NotNow: an error of the device or the process, not of the binary. It may pass.
enum class Loads { Yes, No, NotNow };
/// Loads a variant if need be. For what is done another way without it: the reason has been logged.
LIGER_RUNTIME_API Loads loads(Kernel& kernel, uint32_t variant, int device);

/// For developer tools: the host's code runs with this config (bytes of the kernel's Config), and launches what a one-entry
/// pack holds under the number of the variant that it stands for, until set_trial(nullptr). Empty on success.
LIGER_RUNTIME_API std::string try_config(
    Kernel& kernel, int device, const std::string& config, uint32_t variant, const std::string& pack);

struct Preloaded {
  uint32_t loaded = 0, missing = 0;
  std::string error;
};
/// Loads every variant that a pack or the disk cache holds; `missing` ones wait for the compile hook at first use. Stops
/// with an error if the device or the process has one.
/// `ops` limits it to the kernels that these operators launch.
LIGER_RUNTIME_API Preloaded preload(int device, const std::vector<std::string>& ops);
/// The kernels that operators launch, those of all without any; `error` set if one is unknown.
LIGER_RUNTIME_API std::vector<Kernel*> kernels_of(const std::vector<std::string>& ops, std::string& error);

/// Compiles a variant for a capability; yields a single-entry pack, or empty with `error` set.
using CompileHook = std::function<std::string(const KernelSpec&, uint32_t variant, int capability, std::string& error)>;
LIGER_RUNTIME_API void set_compile_hook(CompileHook hook);
bool has_compile_hook();
/// Name and version of the hook's compiler: part of the disk cache's key.
LIGER_RUNTIME_API void set_compiler(const std::string& compiler);
/// False if LIGER_OPS_JIT=0.
LIGER_RUNTIME_API bool jit_enabled();
LIGER_RUNTIME_API std::string jit_cache_directory();

/// $LIGER_OPS_PACK_DIR, or `packs` beside the folder that holds this library.
LIGER_RUNTIME_API std::string pack_directory();
/// All readable packs of that folder, opened at the first call.
const std::vector<std::unique_ptr<Pack>>& packs();

/// The path that a kernel's first launch would take, as far as can be told without loading it.
const char* path_of(const Kernel& kernel, const Device& device);

}  // namespace liger::runtime
