#pragma once

// Disk cache of kernels compiled at run time. Each file is a pack with one entry.

#include <cstdint>
#include <string>

namespace liger::runtime {

class JitCache {
 public:
  /// $LIGER_OPS_CACHE_DIR, or liger_ops under the user's cache folder. Empty if there is neither.
  static std::string directory();

  /// Uses kernels of this compiler, e.g. "triton-3.6.0". Empty (a process without Python): the newest in the cache.
  static void set_compiler(const std::string& compiler);

  /// Path of a kernel's file. Empty if there is no usable folder. A folder that other users can write to is logged as
  /// unusable.
  static std::string path(const std::string& kernel, uint64_t hash, uint32_t variant, int arch, bool create);

  /// Atomic: another process sees the whole file or none.
  static void store(const std::string& path, const std::string& bytes);
};

}  // namespace liger::runtime
