#pragma once

// Kernels compiled at run time, kept on disk for the next process: one single-entry pack a file.

#include <cstdint>
#include <string>

namespace liger::runtime {

class JitCache {
 public:
  /// $LIGER_OPS_CACHE_DIR, or liger_ops under the user's cache folder. Empty if there is neither.
  static std::string directory();

  /// Which compiler's kernels to use, e.g. "triton-3.6.0". Empty: the newest found (a process without Python).
  static void set_compiler(const std::string& compiler);

  /// Path of a kernel's file; empty, with a line in the log, if the folder is not this user's alone.
  static std::string path(const std::string& kernel, uint64_t hash, uint32_t variant, int arch, bool create);

  /// Atomic: another process sees the whole file or none.
  static void store(const std::string& path, const std::string& bytes);
};

}  // namespace liger::runtime
