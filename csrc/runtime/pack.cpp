#include "runtime/pack.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "runtime/crc32.h"
#include "runtime/lzma.h"

namespace liger::runtime {
namespace {

constexpr char kMagic[8] = {'L', 'I', 'G', 'E', 'R', 'P', 'A', 'K'};
constexpr uint32_t kVersion = 3;

#pragma pack(push, 1)
struct Header {
  char magic[8];
  uint32_t version, kind, arch, count;
  uint64_t bytes;
  uint32_t names_bytes;
  uint32_t checksum;  // of the preceding fields, the index and the names
};
struct Entry {
  uint64_t kernel_hash;
  uint32_t variant, checksum;
  uint64_t offset;  // of a block, which has `stored` bytes
  uint32_t stored, raw, shared, num_warps, name_offset, name_bytes;
  uint32_t first;  // where the `raw` bytes of the binary begin in the decoded block
};
#pragma pack(pop)
static_assert(sizeof(Header) == 40 && sizeof(Entry) == 52);

// A larger decoded size means that the file is damaged.
constexpr uint32_t kMaxRawBytes = 64u << 20;

template <class T>
T read_at(const uint8_t* data, size_t offset) {
  T value;
  std::memcpy(&value, data + offset, sizeof(T));
  return value;
}

Entry entry_at(const uint8_t* data, size_t i) { return read_at<Entry>(data, sizeof(Header) + i * sizeof(Entry)); }

}  // namespace

std::unique_ptr<Pack> Pack::open(const std::string& path, std::string& error) {
  int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info{};
  if (file < 0 || fstat(file, &info) != 0) {
    error = path + ": " + std::strerror(errno);
    if (file >= 0) close(file);
    return nullptr;
  }
  std::unique_ptr<Pack> pack(new Pack);
  pack->origin_ = path;
  pack->bytes_ = info.st_size;
  void* mapping = info.st_size ? mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  if (mapping == MAP_FAILED) {
    error = path + ": " + (info.st_size ? std::strerror(errno) : "empty file");
    return nullptr;
  }
  pack->data_ = static_cast<const uint8_t*>(mapping);
  pack->mapped_ = true;
  return pack->check(error) ? std::move(pack) : nullptr;
}

std::unique_ptr<Pack> Pack::parse(std::string bytes, const std::string& origin, std::string& error) {
  std::unique_ptr<Pack> pack(new Pack);
  pack->origin_ = origin;
  pack->owned_ = std::move(bytes);
  pack->data_ = reinterpret_cast<const uint8_t*>(pack->owned_.data());
  pack->bytes_ = pack->owned_.size();
  return pack->check(error) ? std::move(pack) : nullptr;
}

Pack::~Pack() {
  if (mapped_) munmap(const_cast<uint8_t*>(data_), bytes_);
}

bool Pack::check(std::string& error) {
  auto refuse = [&](const std::string& why) {
    error = origin_ + ": " + why;
    return false;
  };
  if (bytes_ < sizeof(Header)) return refuse("truncated at " + std::to_string(bytes_) + " bytes");
  auto header = read_at<Header>(data_, 0);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return refuse("not a kernel pack");
  if (header.version != kVersion) {
    return refuse("pack version " + std::to_string(header.version) + ", this build reads " + std::to_string(kVersion));
  }
  if (header.bytes != bytes_) {
    return refuse("truncated: " + std::to_string(bytes_) + " of " + std::to_string(header.bytes) + " bytes");
  }
  // 64-bit arithmetic, so that a damaged count cannot overflow.
  uint64_t index_bytes = uint64_t(header.count) * sizeof(Entry) + header.names_bytes;
  if (sizeof(Header) + index_bytes > bytes_ || header.kind > 1) return refuse("corrupt header");
  uint32_t checksum = crc32(data_, offsetof(Header, checksum));
  if (crc32(data_ + sizeof(Header), index_bytes, checksum) != header.checksum) return refuse("corrupt header or index");
  uint64_t names = sizeof(Header) + uint64_t(header.count) * sizeof(Entry);
  for (size_t i = 0; i < header.count; ++i) {
    Entry e = entry_at(data_, i);
    bool inside =
        e.offset <= bytes_ && e.stored <= bytes_ - e.offset && e.raw <= kMaxRawBytes && e.first <= kMaxRawBytes;
    bool named = names + e.name_offset + uint64_t(e.name_bytes) <= names + header.names_bytes;
    if (!inside || !named) return refuse("corrupt index entry " + std::to_string(i));
  }
  kind_ = static_cast<BinaryKind>(header.kind);
  arch_ = static_cast<int>(header.arch);
  count_ = header.count;
  return true;
}

std::vector<std::string> Pack::names() const {
  std::vector<std::string> out;
  for (size_t i = 0; i < count_; ++i) out.push_back(name(i));
  return out;
}

std::string Pack::name(size_t i) const {
  Entry e = entry_at(data_, i);
  size_t names = sizeof(Header) + count_ * sizeof(Entry);
  return std::string(reinterpret_cast<const char*>(data_) + names + e.name_offset, e.name_bytes);
}

size_t Pack::locate(uint64_t kernel_hash, uint32_t variant) const {
  size_t low = 0, high = count_;
  while (low < high) {
    size_t middle = (low + high) / 2;
    Entry e = entry_at(data_, middle);
    if (e.kernel_hash < kernel_hash || (e.kernel_hash == kernel_hash && e.variant < variant)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == count_) return count_;
  Entry e = entry_at(data_, low);
  return e.kernel_hash == kernel_hash && e.variant == variant ? low : count_;
}

bool Pack::decode(size_t at, std::string& code) const {
  Entry e = entry_at(data_, at);
  if (crc32(data_ + e.offset, e.stored) != e.checksum) return false;
  if (!lzma_decode(data_ + e.offset, e.stored, size_t(e.first) + e.raw, code)) return false;
  code.erase(0, e.first);
  return true;
}

Pack::Lookup Pack::find(uint64_t kernel_hash, uint32_t variant, Binary& out, std::string& error) const {
  size_t at = locate(kernel_hash, variant);
  if (at == count_) return Lookup::Absent;
  Entry e = entry_at(data_, at);
  if (!decode(at, out.code)) {
    error = origin_ + ": corrupt entry " + std::to_string(at) + " (" + name(at) + ")";
    return Lookup::Damaged;
  }
  out.num_warps = e.num_warps;
  out.shared = e.shared;
  return Lookup::Found;
}

}  // namespace liger::runtime
