#pragma once

#include <cstdint>
#include <string>

#include "runtime/export.h"
#include "runtime/kernel.h"

namespace liger::runtime {

struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

/// Launches a variant, loading it first if need be. Empty on success, else one sentence that says what failed.
/// After the first call for a (device, variant): no lock, no allocation.
LIGER_RUNTIME_API std::string launch(
    Kernel& kernel, uint32_t variant, int device, void* stream, Grid grid, const void* args);

}  // namespace liger::runtime
