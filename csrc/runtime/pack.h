#pragma once

// The pack: one file with every kernel of one architecture. liger_ops/aot/pack.py writes it.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/export.h"

namespace liger::runtime {

enum class BinaryKind : uint32_t { Cubin = 0, Ptx = 1 };

/// One kernel's binary, decoded and verified.
struct Binary {
  std::string code;
  uint32_t num_warps;
  uint32_t shared;
};

class LIGER_RUNTIME_API Pack {
 public:
  /// Memory-maps a file. Null with `error` set if it is missing, truncated, corrupt or has another version.
  static std::unique_ptr<Pack> open(const std::string& path, std::string& error);
  /// The same for bytes in memory, which the pack owns.
  static std::unique_ptr<Pack> parse(std::string bytes, const std::string& origin, std::string& error);
  ~Pack();
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  const std::string& origin() const { return origin_; }
  BinaryKind kind() const { return kind_; }
  int arch() const { return arch_; }
  size_t size() const { return count_; }
  /// Names of all entries, for listings.
  std::vector<std::string> names() const;

  size_t bytes() const { return bytes_; }

  bool holds(uint64_t kernel_hash, uint32_t variant) const { return locate(kernel_hash, variant) < count_; }
  enum class Lookup { Found, Absent, Damaged };
  Lookup find(uint64_t kernel_hash, uint32_t variant, Binary& out, std::string& error) const;

 private:
  Pack() = default;
  bool check(std::string& error);
  std::string name(size_t entry) const;
  bool decode(size_t entry, std::string& code) const;
  /// Index of an entry; size() if there is none.
  size_t locate(uint64_t kernel_hash, uint32_t variant) const;

  std::string origin_;
  std::string owned_;
  const uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  bool mapped_ = false;
  BinaryKind kind_ = BinaryKind::Cubin;
  int arch_ = 0;
  size_t count_ = 0;
};

}  // namespace liger::runtime
