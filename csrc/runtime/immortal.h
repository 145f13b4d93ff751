#pragma once

#include <utility>

namespace liger::runtime {

/// An object that is never destroyed, because threads may still launch kernels while the process ends.
template <class T, class... Arguments>
T& immortal(Arguments&&... arguments) {
  return *new T(std::forward<Arguments>(arguments)...);
}

}  // namespace liger::runtime
