#pragma once

// Kernels without a GPU, for tests. With LIGER_OPS_INTERPRET=1 operators call their CUDA code for tensors of the CPU,
// and a function runs their kernels there: Triton's interpreter.

#include <functional>
#include <string>

#include "runtime/export.h"
#include "runtime/kernel.h"

namespace liger::runtime {

/// Empty on success.
using Interpreter = std::function<std::string(const Kernel&, uint32_t variant, Grid, const void* arguments)>;

/// Read once, before operators are registered.
LIGER_RUNTIME_API bool interprets() noexcept;

/// made_up: what operators believe the device to be. The interpreter must live as long as the process.
LIGER_RUNTIME_API void set_interpreter(const Interpreter* interpreter, const DeviceInfo& made_up);
const Interpreter* interpreter() noexcept;

}  // namespace liger::runtime
