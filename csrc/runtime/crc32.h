#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace liger::runtime {

/// CRC-32 as in zlib. before: the CRC-32 of the preceding bytes.
inline uint32_t crc32(const uint8_t* data, size_t size, uint32_t before = 0) {
  static const auto table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (c & 1 ? 0xedb88320u : 0);
      t[i] = c;
    }
    return t;
  }();
  uint32_t crc = ~before;
  for (size_t i = 0; i < size; ++i) crc = table[(crc ^ data[i]) & 0xff] ^ (crc >> 8);
  return ~crc;
}

}  // namespace liger::runtime
