#pragma once

// Which compiled code runs on which device. Compute capabilities are major * 10 + minor.

#include <initializer_list>

namespace liger::runtime {

/// Integrated GPUs. Their cubins run on no other capability, and they run no other cubins.
constexpr bool is_tegra(int capability) {
  for (int tegra : {53, 62, 72, 87, 101, 110}) {
    if (capability == tegra) return true;
  }
  return false;
}

/// A cubin runs on devices of its own major version, from its minor version up.
constexpr bool cubin_runs_on(int target, int device) {
  if (target == device) return true;
  if (is_tegra(target) || is_tegra(device)) return false;
  return target / 10 == device / 10 && target <= device;
}

/// The driver compiles PTX for any device of at least that capability.
constexpr bool ptx_runs_on(int target, int device) { return target <= device; }

}  // namespace liger::runtime
