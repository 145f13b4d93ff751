#pragma once

#include <cstdint>
#include <string>

#include "runtime/export.h"
#include "runtime/kernel.h"

namespace liger::runtime {

/// Launches a variant; loads it first if necessary. Empty on success, else one sentence that says what failed. Takes no
/// lock and allocates nothing after the first call for a (device, variant).
LIGER_RUNTIME_API std::string launch(
    Kernel& kernel, uint32_t variant, int device, void* stream, Grid grid, const void* args);

}  // namespace liger::runtime
