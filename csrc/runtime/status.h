#pragma once

// The runtime's status, and counts of CPU calls and GEMMs.

#include <cstdint>
#include <string>

#include "runtime/export.h"

namespace liger::runtime {

/// JSON: folders, packs, JIT state, devices with the path that each kernel takes there, kernel launches by source, and
/// the number of GEMMs in tiles of our choice.
LIGER_RUNTIME_API std::string status();

/// Counts calls that ran on the CPU and GEMMs in tiles of our choice. Tests use them and the launch counts to see which
/// path ran.
LIGER_RUNTIME_API void count_cpu_call() noexcept;
LIGER_RUNTIME_API uint64_t cpu_calls() noexcept;
LIGER_RUNTIME_API void count_gemm() noexcept;
LIGER_RUNTIME_API uint64_t gemms() noexcept;
LIGER_RUNTIME_API void reset_counts() noexcept;

}  // namespace liger::runtime
