#pragma once

// torch.ops.liger.* as C++ functions, on libtorch: the same operators through the same dispatcher, differentiable and
// without Python. Names, arguments and defaults are those of the schemas.
//
//   find_package(liger_ops REQUIRED)                         # CMAKE_PREFIX_PATH=$(python -m liger_ops --cmake-prefix)
//   target_link_libraries(program PRIVATE liger_ops::liger_ops)

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace liger {
namespace detail {

template <class Function>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace detail

/// Loads the kernels of a CUDA device whose names begin with one of `kernels` (all, if none is named), before a graph
/// capture or a timed region. The number loaded.
inline int64_t preload(int64_t device, std::vector<std::string> kernels = {}) {
  static const auto op =
      detail::find<std::tuple<int64_t, int64_t>(int64_t, std::vector<std::string>)>("liger::_preload");
  return std::get<0>(op.call(device, std::move(kernels)));
}

/// JSON: devices, packs, and the launches of each kernel by the source it came from.
inline std::string status() {
  static const auto op = detail::find<std::string()>("liger::_status");
  return op.call();
}

}  // namespace liger

// The operators, each with its schema's arguments.
#include "liger_ops/operators.h"
