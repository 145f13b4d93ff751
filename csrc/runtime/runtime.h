#pragma once

// Loading and launching. Nothing here knows torch or Python.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/kernel.h"

namespace liger::runtime {

struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

struct DeviceInfo {
  int capability;  // major * 10 + minor
  int multiprocessors;
  std::string name;
};

/// Launches a variant, loading it first if need be. Empty on success, else one sentence that says what failed.
/// After the first call for a (device, variant): no lock, no allocation.
LIGER_RUNTIME_API std::string launch(
    Kernel& kernel, uint32_t variant, int device, void* stream, Grid grid, const void* args);

/// For developer tools: the host's code runs with this config (bytes of the kernel's Config), and launches what a one-entry
/// pack holds under the number of the variant that it stands for, until set_trial(nullptr). Empty on success.
LIGER_RUNTIME_API std::string try_config(
    Kernel& kernel, int device, const std::string& config, uint32_t variant, const std::string& pack);

/// NotNow: an error of the device or the process, not of the binary. It may pass.
enum class Loads { Yes, No, NotNow };
/// Loads a variant if need be. For what is done another way without it: the reason has been logged.
LIGER_RUNTIME_API Loads loads(Kernel& kernel, uint32_t variant, int device);

/// Number of multiprocessors; 0 if the device or the driver is unusable, which launch() will then explain.
LIGER_RUNTIME_API int multiprocessors(int device);

LIGER_RUNTIME_API int device_count();
/// Null and `error` set if there is no such device.
LIGER_RUNTIME_API const DeviceInfo* device_info(int device, std::string& error);

struct Preloaded {
  uint32_t loaded = 0, missing = 0;
  std::string error;
};
/// Makes the device's primary context current in a thread that has none, as autograd's threads have before their first
/// CUDA call. A context that is current stays: the device guard is the caller's. Empty on success.
std::string give_context(int device);

/// Loads every variant that a pack or the disk cache holds; `missing` ones wait for the compile hook at first use. Stops
/// with an error if the device or the process has one.
/// `ops` limits it to the kernels that these operators launch.
LIGER_RUNTIME_API Preloaded preload(int device, const std::vector<std::string>& ops);
/// The kernels that operators launch, those of all without any; `error` set if one is unknown.
LIGER_RUNTIME_API std::vector<Kernel*> kernels_of(const std::vector<std::string>& ops, std::string& error);

/// Compiles a variant for a capability; yields a single-entry pack, or empty with `error` set.
using CompileHook = std::function<std::string(const KernelSpec&, uint32_t variant, int capability, std::string& error)>;
LIGER_RUNTIME_API void set_compile_hook(CompileHook hook);
/// Name and version of the hook's compiler: part of the disk cache's key.
LIGER_RUNTIME_API void set_compiler(const std::string& compiler);
/// False if LIGER_OPS_JIT=0.
LIGER_RUNTIME_API bool jit_enabled();
LIGER_RUNTIME_API std::string jit_cache_directory();

/// $LIGER_OPS_PACK_DIR, or `packs` beside the folder that holds this library.
LIGER_RUNTIME_API std::string pack_directory();

/// JSON: folders, packs, JIT state, devices with the path each kernel takes there, the launches of kernels by source, and
/// the matrix products in tiles of our choice.
LIGER_RUNTIME_API std::string status();

/// Calls that ran on the CPU, counted beside the launches so that tests can tell which path ran.
LIGER_RUNTIME_API void count_cpu_call() noexcept;
LIGER_RUNTIME_API uint64_t cpu_calls() noexcept;
LIGER_RUNTIME_API void reset_counts() noexcept;

}  // namespace liger::runtime
