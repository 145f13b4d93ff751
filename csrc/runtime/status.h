#pragma once

// What there is and what ran.

#include <cstdint>
#include <string>

#include "runtime/export.h"

namespace liger::runtime {

/// JSON: folders, packs, JIT state, devices with the path each kernel takes there, the launches of kernels by source, and
/// the GEMMs in tiles of our choice.
LIGER_RUNTIME_API std::string status();

/// Calls that ran on the CPU and GEMMs in tiles of our choice, counted beside the launches so that tests can tell which
/// path ran.
LIGER_RUNTIME_API void count_cpu_call() noexcept;
LIGER_RUNTIME_API uint64_t cpu_calls() noexcept;
LIGER_RUNTIME_API void count_gemm() noexcept;
LIGER_RUNTIME_API uint64_t gemms() noexcept;
LIGER_RUNTIME_API void reset_counts() noexcept;

}  // namespace liger::runtime
