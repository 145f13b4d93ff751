#pragma once

// Launches of kernels on compute capability 9.0 that multiply tokens and classes tile by tile. See
// liger_ops/kernels/losses/_products.py.

#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include "core/aten.h"
#include "core/cuda/launch.h"
#include "runtime/device.h"
#include "runtime/loader.h"
#include "runtime/tensor_map.h"

namespace liger::ops::linear {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class K>
struct Products {
  static constexpr const auto& kConfig = K::configs[0];
  static constexpr int64_t kPairRows = 2 * kConfig.TILE_M;  // of a cluster, which shares tiles of the weight

  static constexpr int64_t tiles(int64_t classes) { return (classes + kConfig.TILE_N - 1) / kConfig.TILE_N; }

  /// True if the device has the kernel. Cached, unless loading failed for a transient reason.
  static bool is_available(int device, bool wanted = true) {
    static std::array<std::atomic<int>, runtime::kMaxDevices> known{};  // 0: unknown
    if (device < 0 || device >= runtime::kMaxDevices) return false;
    int answer = known[device].load(std::memory_order_relaxed);
    if (answer == 0) {
      const bool can = wanted && core::is_for<K>({at::kCUDA, c10::DeviceIndex(device)}) && runtime::maps_tiles();
      const auto loads = can ? runtime::loads(K::kernel, 0, device) : runtime::Loads::No;
      if (loads == runtime::Loads::NotNow) return false;
      answer = loads == runtime::Loads::Yes ? 1 : -1;
      known[device].store(answer, std::memory_order_relaxed);
    }
    return answer > 0;
  }

  /// Describes a matrix with unit stride to the copy engine.
  template <class Map>
  static void map(const char* op, const char* name, Map& to, const at::Tensor& t, int tile_rows, int tile_columns) {
    const int64_t row_bytes = t.stride(0) * int64_t(t.element_size());
    const std::string error =
        runtime::map_tiles(to, core::address(t), t.size(0), t.size(1), row_bytes, tile_rows, tile_columns);
    TORCH_CHECK(error.empty(), op, ": tensor map of ", name, " ", t.sizes(), " failed: ", error);
  }

  /// Sets the arguments of the GEMM, and returns its programs. x: (rows, columns), weight: (n, columns).
  static uint32_t prepare(const char* op, typename K::Args& args, const at::Tensor& x, const at::Tensor& weight) {
    // All tiles of classes use one group of rows of x before the next, so that the group stays in the L2 cache.
    constexpr int64_t kGroupBytes = 16 << 20;
    map(op, "input", args.x, x, kConfig.TILE_M, kConfig.TILE_K);
    map(op, "weight", args.weight, weight, kConfig.TILE_N / 2, kConfig.TILE_K);
    args.rows = int32_t(x.size(0));
    args.n = int32_t(weight.size(0));
    args.columns = int32_t(x.size(1));
    const int64_t pairs = ceil_div(x.size(0), kPairRows);
    args.group = int32_t(std::clamp<int64_t>(kGroupBytes / (kPairRows * x.size(1) * 2), 1, pairs));
    const int64_t clusters = core::persistent_programs(x.device(), 2 * pairs * tiles(weight.size(0)), 1) / 2;
    return uint32_t(2 * std::max<int64_t>(1, clusters));
  }
};

}  // namespace liger::ops::linear
