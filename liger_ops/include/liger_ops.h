#pragma once

// torch.ops.liger.* as C++ functions for libtorch programs. They call the same operators through the same dispatcher,
// with autograd and without Python. Names, arguments and defaults are those of the schemas.
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

/// Loads the kernels of these operators (of all, if `ops` is empty) on a CUDA device, before a graph capture or a timed
/// region. Returns the number of kernels loaded.
inline int64_t preload(int64_t device, std::vector<std::string> ops = {}) {
  static const auto op =
      detail::find<std::tuple<int64_t, int64_t>(int64_t, std::vector<std::string>)>("liger::_preload");
  return std::get<0>(op.call(device, std::move(ops)));
}

/// JSON with devices, packs, and the launches of each kernel by source.
inline std::string status() {
  static const auto op = detail::find<std::string()>("liger::_status");
  return op.call();
}

}  // namespace liger

// The operators, each with its schema's arguments.
#include "liger_ops/operators.h"
